// The verbs provider: opens devices, registers the worker's memory with them, meets peers over TCP
// and runs the sessions. README.md lists its settings.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/net/acceptor_provider.h"
#include "verbs/session.h"

namespace baton::verbs {

class VerbsProvider final : public net::AcceptorProvider<Shared> {
 public:
  // A null argument stands for this machine's own.
  VerbsProvider(const ProviderContext& context, const VerbsApi* api,
                std::shared_ptr<const Locality> locality = nullptr);

  absl::Status takes(const RegionEntry& region) const override;
  absl::Status add_region(const RegionEntry& region) override;
  absl::Status remove_region(const RegionEntry& region, EventSink& sink) override;
  bool progress(EventSink& sink) override;
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

  std::vector<Watch> watches_;  // one per device
  std::vector<std::unique_ptr<Session>> sessions_;
  bool look_ = true;     // at the descriptors, in the next round
  uint32_t rounds_ = 0;  // since the last look
  Time now_{};           // of the last look
};

// For WorkerOptions::extra_providers: the provider over other tables of calls, on another machine.
ProviderFactory verbs_over(const VerbsApi& api, std::shared_ptr<const Locality> locality = nullptr);

}  // namespace baton::verbs
