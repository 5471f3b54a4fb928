// A small transfer that nothing waits in front of is with the adapter when submit() returns.
#include <poll.h>

#include <thread>

#include "tests/verbs/verbs_pair.h"

namespace baton {
namespace {

class FastPath : public testing::Test {
 protected:
  FastPath() {
    pair_.connect();
    EXPECT_TRUE(pair_.run(pair_.request(Op::kWrite, 100)).ok());  // the region is known now
    pair_.steps(100);
  }
  uint64_t doorbells() const { return pair_.fake->stats().doorbells; }
  TransferRequest small() const { return pair_.request(Op::kWrite, 8); }

  VerbsPair pair_{{}};
};

TEST_F(FastPath, SubmitRingsTheDoorbell) {
  pair_.fill(9);
  const uint64_t before = doorbells();
  const auto id = must(pair_.a.worker->submit(small()));
  EXPECT_EQ(doorbells(), before + 1) << "with no call in between";
  EXPECT_TRUE(pair_.finish(id).ok());
  EXPECT_TRUE(
      std::equal(pair_.a.memory.begin(), pair_.a.memory.begin() + 8, pair_.b.memory.begin()));
}

TEST_F(FastPath, ACounterAndAReadDoToo) {
  const CounterId counter = *pair_.b.worker->allocate_counter();
  TransferRequest counted = small();
  counted.counter = pair_.b.worker->remote_counter(counter);
  for (const TransferRequest& each : {counted, pair_.request(Op::kRead, 8)}) {
    const uint64_t before = doorbells();
    const auto id = must(pair_.a.worker->submit(each));
    EXPECT_EQ(doorbells(), before + 1);
    EXPECT_TRUE(pair_.finish(id).ok());
    pair_.steps(10);
  }
  EXPECT_EQ(pair_.b.worker->counter_value(counter), 1u);
}

TEST_F(FastPath, WhatIsUnderWayIsJoinedByTheRestInOneDoorbell) {
  const uint64_t before = doorbells();
  std::vector<TransferId> ids;
  for (int i = 0; i < 10; ++i) ids.push_back(*pair_.a.worker->submit(small()));
  EXPECT_EQ(doorbells(), before + 1) << "the first";
  pair_.a.worker->progress();
  EXPECT_EQ(doorbells(), before + 2) << "all others";
  for (const TransferId id : ids) EXPECT_TRUE(pair_.finish(id).ok());
}

TEST_F(FastPath, LargeOnesWaitForARound) {
  const uint64_t before = doorbells();
  const auto id = pair_.a.worker->submit(pair_.request(Op::kWrite, 64 << 10));
  EXPECT_EQ(doorbells(), before);
  EXPECT_TRUE(pair_.finish(*id).ok());
}

// The next one from the end of the one before, where the lock is held.
TEST_F(FastPath, FromTheEndOfAnother) {
  struct Chain {
    VerbsPair& pair;
    TransferRequest each;
    int left = 100;
  } chain{pair_, small()};
  chain.each.detached = true;
  chain.each.context = &chain;
  chain.each.on_end = [](void* context, TransferId, const absl::Status& status) {
    EXPECT_TRUE(status.ok()) << status;
    Chain& self = *static_cast<Chain*>(context);
    if (--self.left == 0) return;
    EXPECT_TRUE(self.pair.a.worker->submit(self.each).ok());
  };
  ASSERT_TRUE(pair_.a.worker->submit(chain.each).ok());
  pair_.until([&] { return chain.left == 0; });
}

TEST_F(FastPath, FromAnotherThreadThanTheOneThatDrives) {
  constexpr uint64_t kCount = 500;
  const CounterId counter = *pair_.b.worker->allocate_counter();
  TransferRequest each = small();
  each.counter = pair_.b.worker->remote_counter(counter);
  each.detached = true;
  each.timeout = kNever;  // the clock runs on while this thread has no processor
  std::thread other([&] {
    for (uint64_t i = 0; i < kCount; ++i) EXPECT_TRUE(pair_.a.worker->submit(each).ok());
  });
  pair_.until([&] { return pair_.b.worker->counter_value(counter) == kCount; });
  other.join();
}

TEST_F(FastPath, ItsMemoryIsInUseUntilItEnds) {
  const auto id = must(pair_.a.worker->submit(small()));
  EXPECT_EQ(pair_.a.worker->stats().open_transfers, 1u);
  const absl::Status refused = pair_.a.worker->deregister_memory(pair_.a.region);
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_TRUE(pair_.finish(id).ok());
  EXPECT_EQ(pair_.a.worker->stats().open_transfers, 0u);
  EXPECT_TRUE(pair_.a.worker->deregister_memory(pair_.a.region).ok());
  EXPECT_FALSE(pair_.run(small()).ok()) << "from memory that is registered no more";
}

TEST_F(FastPath, ItsTimeRunsOut) {
  pair_.fake->set_cable(0, false);
  TransferRequest late = small();
  late.timeout = std::chrono::milliseconds(5);
  const auto id = must(pair_.a.worker->submit(late));
  EXPECT_EQ(pair_.a.worker->next_timer(), pair_.clock.now() + late.timeout);
  EXPECT_EQ(pair_.finish(id).code(), absl::StatusCode::kDeadlineExceeded);
}

// What is wrong is said as ever, and costs no slot.
TEST_F(FastPath, WhatCannotBeIsRefused) {
  std::vector<TransferRequest> wrong(5, small());
  wrong[0].remote_layout = Layout::contiguous(0, 9);
  wrong[1].local_layout = Layout::contiguous(VerbsPair::kBytes - 7, 8);
  wrong[2].remote_layout = Layout::contiguous(VerbsPair::kBytes - 7, 8);
  wrong[3].remote.access = Access::kRemoteRead;
  wrong[4].counter = {.index = CounterTable::kCapacity, .generation = 1};
  const uint64_t before = doorbells();
  for (const TransferRequest& each : wrong) EXPECT_FALSE(pair_.a.worker->submit(each).ok());
  TransferRequest stranger = small();
  stranger.remote.owner = WorkerUid::random();
  TransferRequest forged = small();
  forged.remote.key ^= 1;
  EXPECT_FALSE(pair_.run(stranger).ok());
  EXPECT_EQ(doorbells(), before);
  EXPECT_FALSE(pair_.run(forged).ok());
  EXPECT_EQ(pair_.a.worker->stats().open_transfers, 0u);
}

TEST_F(FastPath, ASleepingPeerIsWoken) {
  // What is asked for is looked at once more.
  bool armed = false;
  for (int i = 0; i < 100 && !armed; ++i) {
    while (pair_.a.worker->progress()) {
    }
    armed = pair_.a.worker->arm();
  }
  ASSERT_TRUE(armed);
  const auto id = pair_.a.worker->submit(small());
  pollfd woken{.fd = pair_.a.worker->wait_fd(), .events = POLLIN, .revents = 0};
  EXPECT_EQ(poll(&woken, 1, 0), 1);
  EXPECT_TRUE(pair_.finish(*id).ok());
}

}  // namespace
}  // namespace baton
