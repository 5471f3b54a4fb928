// What a send of the perftest-shaped commands is: it takes a receive of the other side, lands there
// whole, and waits for whoever does not look.
#include "bench/perftest/perf_end.h"

#include "tests/test.h"
#include "tests/until.h"

namespace baton::bench {
namespace {

class Sends : public testing::Test {
 protected:
  struct Side {
    std::unique_ptr<Worker> worker;
    PeerId peer;
    std::unique_ptr<PerfEnd> end;
  };

  void start(size_t receives, size_t size) {
    plan_.test = *PerfTest::named("send_bw");
    plan_.receives = receives;
    plan_.area = 2 * PerfPlan::stride(size);
    for (Side* side : {&a_, &b_}) {
      side->worker = must(Worker::create({.providers = {"shm"}}));
    }
    a_.peer = *a_.worker->connect(b_.worker->address());
    until([&] {
      if (const auto event = b_.worker->next_peer_event()) b_.peer = event->peer;
      return b_.peer.generation != 0 && a_.worker->peer_state(a_.peer) == PeerState::kUp;
    });
    for (Side* side : {&a_, &b_}) {
      side->end = must(PerfEnd::create(*side->worker, side->peer, plan_, {}));
    }
    ASSERT_TRUE(a_.end->attach({{"ends", *b_.end->describe()}}).ok());
    ASSERT_TRUE(b_.end->attach({{"ends", *a_.end->describe()}}).ok());
    for (Side* side : {&a_, &b_}) {
      ASSERT_TRUE(side->end->prepare({.size = size, .seed = 7}).ok());
    }
  }
  template <typename Fact>
  void until(Fact fact, CallSite from = CallSite::here()) {
    const auto turn = [&] {
      a_.worker->progress();
      b_.worker->progress();
    };
    const auto state = [&] {
      return state_of(a_.worker->stats(), "a") + state_of(b_.worker->stats(), "b");
    };
    baton::until(fact, turn, state, from);
  }
  // As many as may be sent now.
  size_t send_all() {
    size_t sent = 0;
    for (; a_.end->may_send(); ++sent) {
      const auto id = must(a_.worker->submit(a_.end->request(number_++)));
      a_.end->count_sent();
      until([&] { return ended(*a_.worker->state(id)); });
      EXPECT_TRUE(a_.worker->wait(id).ok());
    }
    return sent;
  }

  PerfPlan plan_;
  Side a_, b_;
  uint64_t number_ = 0;
};

TEST_F(Sends, WaitForReceivesThatAreOpen) {
  start(16, 100);
  EXPECT_EQ(send_all(), 16u);
  EXPECT_EQ(send_all(), 0u) << "nobody has looked at those that are there";
  EXPECT_TRUE(b_.end->take_in());
  EXPECT_FALSE(b_.end->take_in()) << "told twice";
  until([&] { return a_.end->may_send(); });
  EXPECT_EQ(send_all(), 16u);
  EXPECT_EQ(b_.end->messages_arrived(), 32u);
  // What is open stays open over runs of another size.
  ASSERT_TRUE(a_.end->prepare({.size = 50, .seed = 8}).ok());
  ASSERT_TRUE(b_.end->prepare({.size = 50, .seed = 8}).ok());
  EXPECT_EQ(send_all(), 0u);
  EXPECT_TRUE(b_.end->take_in());
  until([&] { return a_.end->may_send(); });
  EXPECT_EQ(send_all(), 16u);
  EXPECT_EQ(b_.end->messages_arrived(), 16u);
}

TEST_F(Sends, LandWholeAndOnce) {
  constexpr size_t kBytes = 3 << 20;
  start(16, kBytes);
  const uint64_t before = a_.worker->stats().transfers_submitted;
  EXPECT_EQ(send_all(), 16u);
  EXPECT_EQ(a_.worker->stats().transfers_submitted - before, 16u);
  EXPECT_EQ(b_.worker->stats().notifications_waiting, 0u);
  EXPECT_EQ(b_.end->messages_arrived(), 16u);
  EXPECT_TRUE(b_.end->verify(16).ok()) << b_.end->verify(16);
}

}  // namespace
}  // namespace baton::bench
