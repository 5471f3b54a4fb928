// The tcp provider: makes rails of the connections that its Meeting brings, and runs them.
//
// Settings: tcp.sockets (per session), tcp.io (auto, epoll, uring), tcp.congestion (auto, system,
// or a name), tcp.slice_kib, tcp.buffer_kib (0: kernel), tcp.stall_ms, tcp.handshake_ms.
#pragma once

#include <memory>
#include <string>

#include "transport/provider.h"
#include "transport/tcp/meeting.h"
#include "transport/tcp/rail.h"

namespace baton::tcp {

class TcpProvider final : public Provider {
 public:
  explicit TcpProvider(const ProviderContext& context);

  const Capabilities& capabilities() const override { return capabilities_; }
  absl::StatusOr<std::string> listen() override { return meeting_.listen(); }
  void set_worker_address(const std::string& encoded) override {
    meeting_.set_worker_address(encoded);
  }
  absl::Status reachable(const std::string& address, std::string_view host_id) const override;
  void connect(const ConnectRequest& request) override;
  absl::Status query(uint64_t session, const std::string& host_port) override;
  absl::Status add_region(const RegionEntry&) override { return absl::OkStatus(); }
  void remove_region(const RegionEntry& region, EventSink& sink) override;
  bool progress(EventSink& sink) override;
  int wait_fd() const override;
  bool arm() override;
  Time next_timer() const override;

 private:
  absl::Status configure();
  void choose_engine(std::string_view wish);
  void met(int fd, const HelloInfo& peer, std::unique_ptr<Meeting::Dial> dial, EventSink& sink);

  std::shared_ptr<TcpShared> shared_;
  Capabilities capabilities_;
  uint16_t sockets_ = 2;
  bool look_ = true;     // at the descriptors, in the next round
  uint32_t rounds_ = 0;  // since the last look
  Meeting meeting_;
};

}  // namespace baton::tcp
