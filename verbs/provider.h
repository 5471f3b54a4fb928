// The verbs provider: opens devices, registers the worker's memory with them, meets peers over TCP
// and runs the sessions. README.md lists its settings.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/net/acceptor.h"
#include "transport/net/endpoint.h"
#include "transport/provider.h"
#include "verbs/session.h"

namespace baton::verbs {

class VerbsProvider final : public Provider {
 public:
  // A null argument stands for this machine's own.
  VerbsProvider(const ProviderContext& context, const VerbsApi* api,
                std::shared_ptr<const Locality> locality = nullptr);

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
  absl::Status takes(const RegionEntry& region) const override;
  absl::Status add_region(const RegionEntry& region) override;
  absl::Status remove_region(const RegionEntry& region, EventSink& sink) override;
  bool progress(EventSink& sink) override;
  int wait_fd() const override { return shared_.poller != nullptr ? shared_.poller->fd() : -1; }
  bool arm() override;
  Time next_timer() const override;

 private:
  struct Watch {
    net::Watched events;
    net::Watched completions;
  };

  absl::Status configure(const VerbsApi* api);
  absl::Status watch_devices();
  absl::Status add_device_memory(Device& device, const RegionEntry& region);
  void note_distances(const RegionEntry& region);
  void note_device_distances(const RegionEntry& region);
  std::string offers() const;
  void met(const net::Link& link, HelloInfo peer, std::unique_ptr<net::Acceptor::Dial> dial);
  bool device_events();
  void on_event(Device& device, const Device::Event& event);

  Shared shared_;
  Capabilities capabilities_;
  std::vector<Watch> watches_;  // one per device
  std::vector<std::unique_ptr<Session>> sessions_;
  net::Acceptor acceptor_;
  bool look_ = true;     // at the descriptors, in the next round
  uint32_t rounds_ = 0;  // since the last look
  Time now_{};           // of the last look
};

// For WorkerOptions::extra_providers: the provider over other tables of calls, on another machine.
ProviderFactory verbs_over(const VerbsApi& api, std::shared_ptr<const Locality> locality = nullptr);

}  // namespace baton::verbs
