// Two workers in this process over one provider, with memory of a (fake) device and of the host on
// both sides.
#pragma once

#include "tests/gpudirect/fake/installed_fake.h"
#include "tests/test.h"
#include "tests/until.h"
#include "transport/worker.h"

namespace baton {

class StagedPair : public testing::Test {
 protected:
  static constexpr size_t kBytes = 8 * gpudirect::kMiB;
  struct Side {
    std::unique_ptr<Worker> worker;
    PeerId peer;
    gpudirect::DevicePointer at = 0;
    std::vector<std::byte> host;
    MemoryRegion device_region;
    MemoryRegion host_region;
  };

  void start(const char* provider = "tcp", gpudirect::FakeOptions options = {}) {
    options.attributes.erase(gpudirect::kDmaBufSupported);
    options.ipc_handles = false;  // over shm too
    installed_.emplace(std::move(options), means_);
    gpu_ = &installed_->fake();
    driver_ = installed_->driver();
    for (Side* side : {&a_, &b_}) {
      WorkerOptions worker;
      worker.name = side == &a_ ? "a" : "b";
      worker.providers = {provider};
      worker.key = *ClusterKey::from_bytes("a secret of the tests");
      worker.settings = {{"staging.ring_mib", "16"}, {"peer.redial_ms", "0"}};
      if (side == &a_) worker.max_transfers = max_transfers_;
      worker.settings.insert(worker.settings.end(), settings_.begin(), settings_.end());
      side->worker = must(Worker::create(std::move(worker)));
      side->at = gpu_->allocate(kBytes);
      side->host.resize(kBytes);
      side->device_region =
          must(side->worker->register_memory(gpudirect::pointer_of<void>(side->at), kBytes));
      side->host_region = *side->worker->register_memory(side->host.data(), kBytes);
    }
    a_.peer = *a_.worker->connect(b_.worker->address());
    until([&] { return a_.worker->peer_state(a_.peer) == PeerState::kUp; });
  }
  void TearDown() override {
    for (Side* side : {&a_, &b_}) side->worker.reset();
    for (Side* side : {&a_, &b_}) gpu_->free(side->at);
    installed_.reset();
  }

  void until(const std::function<bool()>& fact, CallSite from = CallSite::here()) {
    const auto turn = [&] {
      const gpudirect::FakeDriver::ProgressThread here;
      a_.worker->progress();
      b_.worker->progress();
    };
    const auto state = [&] {
      return state_of(*a_.worker, a_.peer, "a") + state_of(*b_.worker, b_.peer, "b") +
             std::to_string(gpu_->queued()) + " operations queued on the device";
    };
    baton::until(fact, turn, state, from);
  }
  void turn(size_t rounds) {
    for (size_t i = 0; i < rounds; ++i) {
      a_.worker->progress();
      b_.worker->progress();
    }
  }
  TransferRequest request(Op op, bool near, bool far, size_t bytes = 600'000, size_t at = 0) {
    return {.op = op,
            .peer = a_.peer,
            .local = near ? a_.device_region : a_.host_region,
            .local_layout = Layout::contiguous(at, bytes),
            .remote = *b_.worker->remote_region(far ? b_.device_region : b_.host_region),
            .remote_layout = Layout::contiguous(at, bytes)};
  }
  absl::Status finish(TransferId id) {
    until([&] { return ended(*a_.worker->state(id)); });
    absl::Status status = a_.worker->status(id);
    EXPECT_TRUE(a_.worker->release(id).ok());
    return status;
  }
  absl::Status run(const TransferRequest& request) {
    auto id = a_.worker->submit(request);
    return id.ok() ? finish(*id) : id.status();
  }

  std::optional<gpudirect::CleanFake> installed_;
  gpudirect::FakeDriver* gpu_ = nullptr;
  gpudirect::Driver driver_;
  Side a_;
  Side b_;
  // How start() makes them.
  gpudirect::CudaMemory::Options means_ = gpudirect::options_of_this_test();
  SettingValues settings_;
  uint32_t max_transfers_ = 4096;  // of `a`
};

}  // namespace baton
