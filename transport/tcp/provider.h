// The tcp provider: makes rails of the connections that its Acceptor brings, and runs them.
#pragma once

#include <memory>
#include <string>

#include "transport/net/acceptor.h"
#include "transport/net/endpoint.h"
#include "transport/provider.h"
#include "transport/tcp/rail.h"

namespace baton::tcp {

class TcpProvider final : public Provider {
 public:
  explicit TcpProvider(const ProviderContext& context);

  const Capabilities& capabilities() const override { return capabilities_; }
  absl::StatusOr<std::string> listen() override { return acceptor_.listen(); }
  uint16_t port() const override { return acceptor_.port(); }
  void set_worker_address(const std::string& encoded) override {
    acceptor_.set_worker_address(encoded);
  }
  absl::Status reachable(const std::string& address, std::string_view host_id) const override;
  void connect(const ConnectRequest& request) override;
  absl::StatusOr<std::string> look_up(const std::string& host_port) const override {
    return net::look_up(host_port);
  }
  absl::Status query(uint64_t session, const std::string& addresses) override;
  absl::Status add_region(const RegionEntry&) override { return absl::OkStatus(); }
  absl::Status remove_region(const RegionEntry& region, EventSink& sink) override;
  bool progress(EventSink& sink) override;
  int wait_fd() const override;
  bool arm() override;
  Time next_timer() const override;

 private:
  absl::Status configure();
  bool read_directly();
  void met(const net::Link& link, const HelloInfo& peer, std::unique_ptr<net::Acceptor::Dial> dial,
           EventSink& sink);
  void call(const std::shared_ptr<CalledSockets>& sockets, uint16_t number, const Paths& paths);
  void look_at(const std::shared_ptr<CalledSockets>& sockets);

  std::shared_ptr<TcpShared> shared_;
  Capabilities capabilities_;
  uint16_t sockets_ = 2;
  bool look_ = true;     // at the descriptors, in the next round
  uint32_t rounds_ = 0;  // since the last look
  net::Acceptor acceptor_;
};

}  // namespace baton::tcp
