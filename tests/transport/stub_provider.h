// A provider that reaches nobody: peers stay as they are, so that a test decides what happens.
#pragma once

#include "tests/std.h"
#include "transport/worker.h"

namespace baton {

class StubProvider : public Provider {
 public:
  // Counts how often the worker made ready to sleep.
  explicit StubProvider(std::atomic<int>& armed, std::string where = "nowhere")
      : armed_(armed), where_(std::move(where)) {}

  const Capabilities& capabilities() const override { return capabilities_; }
  absl::StatusOr<std::string> listen() override { return where_; }
  absl::Status reachable(const std::string&, std::string_view) const override {
    return absl::OkStatus();
  }
  void connect(const ConnectRequest&) override {}
  absl::Status add_region(const RegionEntry&) override { return absl::OkStatus(); }
  absl::Status remove_region(const RegionEntry&, EventSink&) override { return fence; }
  bool progress(EventSink&) override { return false; }
  int wait_fd() const override { return -1; }
  bool arm() override {
    ++armed_;
    return true;
  }

  absl::Status takes(const RegionEntry& region) const override {
    return reaches_devices ? absl::OkStatus() : Provider::takes(region);
  }

  bool reaches_devices = false;
  absl::Status fence;  // what comes of taking a region back

 private:
  std::atomic<int>& armed_;
  const std::string where_;
  Capabilities capabilities_{.name = "stub", .available = true};
};

// A worker with nothing but a provider of this kind.
template <typename Kind>
absl::StatusOr<std::unique_ptr<Worker>> worker_over(Kind*& provider, std::atomic<int>& armed,
                                                    WorkerOptions options,
                                                    const std::string& where = "nowhere") {
  options.key = *ClusterKey::from_bytes("a secret of the tests");
  options.extra_providers.emplace_back([&provider, &armed, where](const ProviderContext&) {
    auto made = std::make_unique<Kind>(armed, where);
    provider = made.get();
    return made;
  });
  return Worker::create(std::move(options));
}

// And a peer of it that never comes up.
struct StubWorker {
  StubWorker() : worker(*worker_over(provider, armed, {.name = "stubbed"})) {
    peer = *worker->connect(worker->address());
  }
  std::atomic<int> armed{0};
  StubProvider* provider = nullptr;
  std::unique_ptr<Worker> worker;
  PeerId peer;
};

}  // namespace baton
