// The verbs provider: opens devices, registers the worker's memory with them, meets peers over TCP
// and runs the sessions. README.md lists its settings.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/provider.h"
#include "transport/tcp/endpoint.h"
#include "transport/tcp/greeting.h"
#include "verbs/session.h"

namespace baton::verbs {

class VerbsProvider final : public Provider {
 public:
  static constexpr size_t kMaxHalfOpen = 64;  // connections that have not proved themselves yet

  // What is null is this machine's.
  VerbsProvider(const ProviderContext& context, const VerbsApi* api, const CmApi* cm = nullptr,
                std::shared_ptr<const Locality> locality = nullptr);
  ~VerbsProvider() override;

  const Capabilities& capabilities() const override { return capabilities_; }
  absl::StatusOr<std::string> listen() override;
  void set_worker_address(const std::string& encoded) override { worker_address_ = encoded; }
  absl::Status reachable(const std::string& address, std::string_view host_id) const override;
  void connect(const ConnectRequest& request) override;
  absl::Status query(uint64_t session, const std::string& host_port) override;
  absl::Status add_region(const RegionEntry& region) override;
  void remove_region(const RegionEntry& region, EventSink& sink) override;
  bool progress(EventSink& sink) override;
  int wait_fd() const override { return shared_.poller != nullptr ? shared_.poller->fd() : -1; }
  bool arm() override;
  Time next_timer() const override;

 private:
  // An attempt to reach a peer, or a query.
  struct Dial {
    uint64_t session = 0;
    HelloInfo expected;
    Handshake::Purpose purpose = Handshake::Purpose::kRail;
    std::string address;
    std::vector<tcp::Endpoint> endpoints;
    size_t next = 0;
    std::string errors;
    absl::StatusCode refusal = absl::StatusCode::kUnavailable;
  };
  struct Call {
    std::unique_ptr<tcp::Greeting> greeting;
    std::unique_ptr<Dial> dial;  // null: they called us
  };
  struct Watch {
    tcp::Watched events;
    tcp::Watched completions;
  };

  absl::Status configure(const VerbsApi* api);
  absl::Status watch_devices();
  void note_distances(const RegionEntry& region);
  std::string offers() const;
  void start(std::unique_ptr<Dial> dial);
  void give_up(std::unique_ptr<Dial> dial, EventSink& sink);
  void accept_some();
  bool advance_calls(EventSink& sink);
  void call_done(Call call, EventSink& sink);
  bool device_events();
  bool cm_events();
  void on_event(Device& device, const Device::Event& event);

  Shared shared_;
  Capabilities capabilities_;
  tcp::SocketOptions socket_options_;
  std::string worker_address_;
  int listener_ = -1;
  tcp::Watched listener_watch_;
  std::vector<Watch> watches_;  // one per device
  std::vector<Call> calls_;
  std::vector<std::unique_ptr<Dial>> failed_;
  std::vector<std::unique_ptr<Session>> sessions_;
  bool look_ = true;     // at the descriptors, in the next round
  uint32_t rounds_ = 0;  // since the last look
  Time now_{};           // of the last look
};

// For WorkerOptions::extra_providers: the provider over other tables of calls, on another machine.
ProviderFactory verbs_over(const VerbsApi& api, const CmApi* cm = nullptr,
                           std::shared_ptr<const Locality> locality = nullptr);

}  // namespace baton::verbs
