// Staged transfers under faults of the driver: each ends, with a clear error where it failed, and
// the host's memory goes on moving. That bytes get where they should is the conformance suite's.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "gpudirect/contract/memory_place.h"
#include "gpudirect/contract/staging.h"
#include "tests/gpudirect/fake/fake_driver.h"
#include "transport/worker.h"

namespace baton {
namespace {

using gpudirect::DevicePointer;
using gpudirect::FakeDriver;
using gpudirect::kMiB;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const Time kPatience = patient(std::chrono::seconds(60));

// Two workers over one provider, with memory of a device and of the host on both sides.
class Staged : public testing::Test {
 protected:
  static constexpr size_t kBytes = 8 * kMiB;
  struct Side {
    std::unique_ptr<Worker> worker;
    PeerId peer;
    DevicePointer at = 0;
    std::vector<std::byte> host;
    MemoryRegion device_region;
    MemoryRegion host_region;
  };

  void start(const char* provider = "tcp", gpudirect::FakeOptions options = {}) {
    options.attributes.erase(gpudirect::kDmaBufSupported);
    gpu_ = std::make_unique<FakeDriver>(std::move(options));
    driver_ = FakeDriver::driver();
    memory_ = std::make_unique<gpudirect::CudaMemory>([this] { return &driver_; });
    internal::use_device_memory(memory_.get());
    for (Side* side : {&a_, &b_}) {
      WorkerOptions worker;
      worker.name = side == &a_ ? "a" : "b";
      worker.providers = {provider};
      worker.key = *ClusterKey::from_bytes("a secret of the tests");
      worker.settings = {{"staging.ring_mib", "16"}, {"peer.redial_ms", "0"}};
      auto made = Worker::create(std::move(worker));
      ASSERT_TRUE(made.ok()) << made.status();
      side->worker = *std::move(made);
      side->at = gpu_->allocate(kBytes);
      side->host.resize(kBytes);
      auto region =
          side->worker->register_memory(reinterpret_cast<void*>(uintptr_t{side->at}), kBytes);
      ASSERT_TRUE(region.ok()) << region.status();
      side->device_region = *region;
      side->host_region = *side->worker->register_memory(side->host.data(), kBytes);
    }
    a_.peer = *a_.worker->connect(b_.worker->address());
    ASSERT_TRUE(drive([&] { return a_.worker->peer_state(a_.peer) == PeerState::kUp; }));
  }
  void TearDown() override {
    for (Side* side : {&a_, &b_}) side->worker.reset();
    internal::use_device_memory(nullptr);
    memory_.reset();
    for (Side* side : {&a_, &b_}) gpu_->free(side->at);
    if (!lost_) {
      EXPECT_THAT(gpu_->finish(), IsEmpty());
    } else {
      EXPECT_THAT(gpu_->violations(), IsEmpty());
    }
    gpu_.reset();
  }

  bool drive(const std::function<bool()>& ready) {
    const Time end = Clock::steady().now() + kPatience;
    while (!ready()) {
      const FakeDriver::ProgressThread here;
      a_.worker->progress();
      b_.worker->progress();
      if (Clock::steady().now() > end) return ready();
    }
    return true;
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
    if (!drive([&] { return ended(*a_.worker->state(id)); })) {
      return absl::InternalError("it never ended");
    }
    absl::Status status = a_.worker->status(id);
    EXPECT_TRUE(a_.worker->release(id).ok());
    return status;
  }
  absl::Status run(const TransferRequest& request) {
    auto id = a_.worker->submit(request);
    return id.ok() ? finish(*id) : id.status();
  }

  std::unique_ptr<FakeDriver> gpu_;
  gpudirect::Driver driver_;
  std::unique_ptr<gpudirect::CudaMemory> memory_;
  Side a_;
  Side b_;
  bool lost_ = false;
};

// One call of the driver after the other fails, wherever it is.
TEST_F(Staged, WhicheverCallFailsTheTransferEndsAndTheNextOneWorks) {
  start();
  size_t failed = 0;
  for (const Op op : {Op::kWrite, Op::kRead}) {
    for (uint64_t k = 1; k <= 60; ++k) {
      SCOPED_TRACE(testing::Message() << "call " << k);
      const std::string sent(600'000, static_cast<char>(k));
      gpu_->write(op == Op::kWrite ? a_.at : b_.at, sent);
      gpu_->fail_call_in(k, gpudirect::kOutOfMemory);
      const absl::Status status = run(request(op, true, true));
      gpu_->fail_call_in(0, gpudirect::kSuccess);  // should it not have come to that
      if (!status.ok()) {
        ++failed;
        EXPECT_THAT(std::string(status.message()), HasSubstr("CUDA_ERROR_OUT_OF_MEMORY"));
      }
      ASSERT_TRUE(run(request(op, false, false)).ok()) << "host traffic goes on";
      const absl::Status next = run(request(op, true, true));
      ASSERT_TRUE(next.ok()) << next;
      ASSERT_TRUE(gpu_->read(op == Op::kWrite ? b_.at : a_.at, sent.size()) == sent);
    }
  }
  EXPECT_GT(failed, 20u);
}

TEST_F(Staged, ALostDeviceEndsItsTransfersAndTheHostsGoOn) {
  for (const size_t rounds : {0, 1, 2, 3, 4, 5, 6, 21}) {
    SCOPED_TRACE(testing::Message() << "lost after " << rounds << " rounds");
    start("shm", {.seed = rounds + 1});
    const TransferId id = *a_.worker->submit(request(Op::kWrite, true, true, kBytes));
    for (size_t i = 0; i < rounds; ++i) {
      a_.worker->progress();
      b_.worker->progress();
    }
    gpu_->lose();
    lost_ = true;
    const absl::Status status = finish(id);
    // Over already, or aborted: which of them is the matter of a few rounds only.
    EXPECT_TRUE(absl::IsAborted(status) || (status.ok() && rounds > 8)) << status;
    EXPECT_TRUE(run(request(Op::kWrite, false, false)).ok());
    EXPECT_FALSE(run(request(Op::kRead, true, false)).ok()) << "it stays lost";
    if (rounds != 21) TearDown();
  }
}

TEST_F(Staged, WhatIsUrgentOvertakesBulk) {
  start("tcp", {.seed = 7});
  const TransferId bulk = *a_.worker->submit(request(Op::kWrite, true, true, kBytes));
  ASSERT_TRUE(drive([&] { return gpu_->calls_of("cuMemcpyAsync") > 2; }));
  ASSERT_TRUE(run(request(Op::kWrite, true, true, 4096)).ok());
  EXPECT_EQ(*a_.worker->state(bulk), TransferState::kActive);
  EXPECT_TRUE(finish(bulk).ok());
  EXPECT_LE(gpu_->largest_copy(), gpudirect::PinnedRing::kLongestCopy);
}

TEST_F(Staged, TheCounterRisesWhenTheCopyHasEndedOnTheDevice) {
  start();
  const CounterId counter = *b_.worker->allocate_counter();
  for (uint64_t round = 1; round <= 50; ++round) {
    const std::string sent(700'000, static_cast<char>(round));
    gpu_->write(a_.at, sent);
    TransferRequest write = request(Op::kWrite, true, true, sent.size());
    write.counter = b_.worker->remote_counter(counter);
    write.notify = "all there";
    const TransferId id = *a_.worker->submit(write);
    ASSERT_TRUE(drive([&] { return b_.worker->counter_value(counter) == round; }));
    ASSERT_TRUE(gpu_->read(b_.at, sent.size()) == sent) << "risen too early";
    EXPECT_TRUE(finish(id).ok());
  }
  Notification heard;
  size_t count = 0;
  while (b_.worker->next_notification(heard)) ++count;
  EXPECT_EQ(count, 50u);
}

TEST_F(Staged, CancelledAtAnyRoundNothingIsCopiedAfterTheEnd) {
  start("shm");
  size_t stopped = 0;
  for (int rounds = 0; rounds < 120; ++rounds) {
    const TransferId id = *a_.worker->submit(request(Op::kWrite, true, true));
    for (int i = 0; i < rounds % 40; ++i) {
      a_.worker->progress();
      b_.worker->progress();
    }
    ASSERT_TRUE(a_.worker->cancel(id).ok());
    if (!finish(id).ok()) ++stopped;
    const std::string reused(600'000, 'r');
    gpu_->write(b_.at, reused);
    gpu_->run_all();
    for (int i = 0; i < 30; ++i) {
      a_.worker->progress();
      b_.worker->progress();
    }
    gpu_->run_all();
    ASSERT_TRUE(gpu_->read(b_.at, reused.size()) == reused) << "after " << rounds << " rounds";
  }
  EXPECT_GT(stopped, 10u);
}

TEST_F(Staged, APeerThatGoesLeavesNothingThatMoves) {
  for (const size_t rounds : {0, 2, 4, 8, 16, 32}) {
    start("tcp", {.seed = rounds + 1});
    const TransferId id = *a_.worker->submit(request(Op::kWrite, true, true, kBytes));
    for (size_t i = 0; i < rounds; ++i) {
      a_.worker->progress();
      b_.worker->progress();
    }
    a_.worker->disconnect(a_.peer, Time::zero()).IgnoreError();
    const absl::Status status = finish(id);
    EXPECT_TRUE(status.ok() || absl::IsUnavailable(status)) << status;
    ASSERT_TRUE(drive([&] { return b_.worker->stats().peers_up == 0; }));
    ASSERT_TRUE(b_.worker->deregister_memory(b_.device_region).ok());
    EXPECT_TRUE(a_.worker->deregister_memory(a_.device_region).ok());
    EXPECT_EQ(gpu_->queued(), 0u) << "a copy is still to come";
    if (rounds != 32) TearDown();
  }
}

TEST_F(Staged, ExplainSaysThatAndWhy) {
  start();
  const std::string text = a_.worker->explain(a_.peer);
  EXPECT_THAT(text, HasSubstr("CUDA device 0: staged through 16 MiB"));
  EXPECT_THAT(text, HasSubstr("tcp moves bytes by the CPU"));
}

}  // namespace
}  // namespace baton
