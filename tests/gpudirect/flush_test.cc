// Devices that may see late what an adapter has written: nobody is told of bytes that they do not
// see yet.
#include "gpudirect/facts.h"
#include "tests/gpudirect/device_verbs.h"
#include "tests/test.h"

namespace baton {
namespace {

using gpudirect::FlushPolicy;

FlushPolicy policy(std::optional<int> ordering, std::optional<int> options) {
  gpudirect::DeviceFacts facts;
  for (size_t i = 0; i < gpudirect::kFactNames.size(); ++i) {
    const auto attribute = gpudirect::kFactNames[i].attribute;
    if (attribute == gpudirect::kRdmaWritesOrdering) facts.values[i] = ordering;
    if (attribute == gpudirect::kRdmaFlushWritesOptions) facts.values[i] = options;
  }
  return gpudirect::flush_policy(facts);
}

TEST(FlushPolicyTest, FollowsWhatTheDeviceSaysOfItself) {
  EXPECT_EQ(policy(200, 1), FlushPolicy::kNone);
  EXPECT_EQ(policy(100, 0), FlushPolicy::kNone);
  EXPECT_EQ(policy(0, 1), FlushPolicy::kCall);
  EXPECT_EQ(policy(0, 3), FlushPolicy::kCall);
  EXPECT_EQ(policy(std::nullopt, 1), FlushPolicy::kCall)
      << "a driver that does not know promises nothing";
  EXPECT_EQ(policy(0, 2), FlushPolicy::kImpossible) << "only by a stream";
  EXPECT_EQ(policy(0, std::nullopt), FlushPolicy::kImpossible);
}

// A device behind an adapter whose writes land when they are flushed, or some time.
class LateWrites : public DeviceVerbs {
 protected:
  void start(gpudirect::Attributes attributes, uint32_t seed, size_t adapters = 1) {
    use_device({.seed = seed, .attributes = std::move(attributes)},
               gpudirect::options_of_this_test());
    pair_ = std::make_unique<VerbsPair>(FakeOptions{.devices = adapters, .late_writes = seed});
    gpu_->on_flush([fake = &*pair_->fake] { fake->land_writes(); });
    connect();
    near_region_ = must(give(pair_->a, near_));
    far_region_ = *pair_->b.worker->remote_region(must(give(pair_->b, far_)));
    counter_ = *pair_->b.worker->allocate_counter();
  }
  // One transfer to a device, and whether the device saw old bytes when its end was told: by a
  // counter, by a notification, or, of a read, by its end.
  bool stale(std::mt19937& random) {
    const size_t bytes = 8 * (1 + random() % 1024);
    const size_t at = 8 * (random() % ((kBytes - bytes) / 8));
    const uint32_t way = random() % 3;
    std::string sent(bytes, '\0');
    for (size_t i = 0; i < bytes; i += 4) {
      const auto word = static_cast<uint32_t>(random());
      std::memcpy(&sent[i], &word, sizeof word);
    }
    VerbsPair::Side& from = way == 2 ? pair_->b : pair_->a;
    std::memcpy(&from.memory[at], sent.data(), bytes);
    TransferRequest request = pair_->request(way == 2 ? Op::kRead : Op::kWrite);
    request.local_layout = request.remote_layout = Layout::contiguous(at, bytes);
    if (way == 2) {
      request.local = near_region_;
    } else {
      request.remote = far_region_;
    }
    if (way == 0) request.counter = pair_->b.worker->remote_counter(counter_);
    if (way == 1) request.notify = "it is there";
    const TransferId id = *pair_->a.worker->submit(request);
    const uint64_t before = pair_->b.worker->counter_value(counter_);
    Notification note;
    pair_->until([&] {
      if (way == 0) return pair_->b.worker->counter_value(counter_) > before;
      if (way == 1) return pair_->b.worker->next_notification(note);
      return ended(*pair_->a.worker->state(id));
    });
    const bool seen = gpu_->read((way == 2 ? near_ : far_) + at, bytes) == sent;
    EXPECT_TRUE(pair_->finish(id).ok());
    return !seen;
  }
  int stale_of(int runs, uint32_t seed) {
    std::mt19937 random(seed);
    int out = 0;
    for (int i = 0; i < runs && !HasFailure(); ++i) out += stale(random) ? 1 : 0;
    return out;
  }

  MemoryRegion near_region_;
  RemoteRegion far_region_;
  CounterId counter_;
};

// More of them: --gtest_repeat=100 --gtest_shuffle --gtest_random_seed=1, which is 10^6 others.
// Promise(devices): Writes that a device may see late are flushed before anything is told | a flush
//   between completions and their readers
TEST_F(LateWrites, AreSeenBeforeAnybodyIsTold) {
  const auto seed = static_cast<uint32_t>(7 + testing::UnitTest::GetInstance()->random_seed());
  start(gpudirect::unordered_writes(), seed);
  EXPECT_EQ(stale_of(10'000, seed), 0);
  EXPECT_GT(gpu_->calls_of("cuFlushGPUDirectRDMAWrites"), 10'000u);
}

// Two ways to the device, of which the one knows nothing of what the other has written.
TEST_F(LateWrites, WritesOfBothAdaptersAreVisibleBeforeCompletion) {
  start(gpudirect::unordered_writes(), 5, 2);
  EXPECT_EQ(stale_of(1'000, 5), 0);
  EXPECT_GT(pair_->fake->moved(0), 0u);
  EXPECT_GT(pair_->fake->moved(1), 0u);
}

// The same adapter, and a device that says it orders what it does not: nothing is flushed.
TEST_F(LateWrites, AreFoundStaleWithoutTheFlush) {
  start(gpudirect::h100(), 0);
  pair_->fake->set_late_writes(7);  // after it was proved
  EXPECT_GT(stale_of(200, 7), 50);
  EXPECT_EQ(gpu_->calls_of("cuFlushGPUDirectRDMAWrites"), 0u);
}

TEST_F(LateWrites, AFlushThatFailsCostsTheRailAndNothingIsToldOfIt) {
  for (const uint64_t seed : {1u, 2u, 3u, 4u}) {
    start(gpudirect::unordered_writes(), static_cast<uint32_t>(seed), 2);
    std::mt19937 random(static_cast<uint32_t>(seed));
    gpu_->fail_next("cuFlushGPUDirectRDMAWrites", gpudirect::kInvalidValue);
    EXPECT_FALSE(stale(random));
    EXPECT_EQ(stale_of(50, static_cast<uint32_t>(seed)), 0);
    if (seed < 4) TearDown();
  }
}

TEST_F(LateWrites, ALostDeviceStopsNoHostTransfer) {
  start(gpudirect::unordered_writes(), 3);
  gpu_->lose();
  TransferRequest request = pair_->request(Op::kWrite, 4096);  // the host's, at both ends
  std::memset(pair_->a.memory.data(), 5, 4096);
  EXPECT_TRUE(pair_->run(request).ok());
  EXPECT_EQ(pair_->b.memory[4095], std::byte{5});
}

}  // namespace
}  // namespace baton
