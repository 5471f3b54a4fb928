// What had arrived when the other side closed: it counts, however soon word of the end comes.
#include "tests/verbs/verbs_pair.h"

namespace baton {
namespace {

constexpr int kEach = 40;

// `a` writes with counters and notifications until it knows that all have arrived. `b` looks at
// nothing meanwhile.
void arrive_unseen(VerbsPair& pair, CounterId counter) {
  std::vector<TransferId> ids;
  for (int i = 0; i < kEach; ++i) {
    TransferRequest counted = pair.request(Op::kWrite, 100);
    counted.counter = pair.b.worker->remote_counter(counter);
    ids.push_back(*pair.a.worker->submit(counted));
    TransferRequest told = pair.request(Op::kWrite, 100);
    told.notify = "look";
    ids.push_back(*pair.a.worker->submit(told));
  }
  for (TransferId id : ids) {
    for (int i = 0; i < 1000 && !ended(*pair.a.worker->state(id)); ++i) pair.a.worker->progress();
    const absl::Status status = pair.a.worker->status(id);
    ASSERT_TRUE(status.ok()) << status;
  }
}

void expect_all_seen(VerbsPair& pair, CounterId counter) {
  EXPECT_EQ(pair.b.worker->counter_value(counter), uint64_t{kEach});
  Notification note;
  int notes = 0;
  while (pair.b.worker->next_notification(note)) ++notes;
  EXPECT_EQ(notes, kEach);
}

// The region is known from a write before, and credits last for all. `b` looks for news of its
// peers once in so many rounds: `rounds` have passed since.
struct Arrived {
  Arrived(size_t devices, int rounds)
      : pair({.devices = devices}, {{"verbs.receive_depth", "256"}}) {
    pair.connect();
    EXPECT_TRUE(pair.run(pair.request(Op::kWrite)).ok());
    counter = *pair.b.worker->allocate_counter();
    for (int i = 0; i < rounds; ++i) pair.b.worker->progress();
    arrive_unseen(pair, counter);
  }
  void let_b_hear_of_it() {
    pair.until([&] { return pair.b.worker->peer_state(pair.b.peer) == PeerState::kDown; });
  }
  VerbsPair pair;
  CounterId counter;
};

class Goodbye : public testing::TestWithParam<int> {
 protected:
  size_t devices() const { return static_cast<size_t>(GetParam() % 2 + 1); }
  int rounds() const { return GetParam() / 2; }
  Arrived arrived_{devices(), rounds()};
};

// Promise(rdma): The end of a connection does not overtake what came before it | completions are
//   read while the queue pair flushes
TEST_P(Goodbye, DoesNotOvertakeWhatHadArrived) {
  arrived_.pair.a.worker->disconnect(arrived_.pair.a.peer, Time::zero()).IgnoreError();
  arrived_.let_b_hear_of_it();
  expect_all_seen(arrived_.pair, arrived_.counter);
}

TEST_P(Goodbye, APeerThatIsGoneDoesNotTakeWhatHadArrivedWithIt) {
  arrived_.pair.a.worker.reset();
  arrived_.let_b_hear_of_it();
  expect_all_seen(arrived_.pair, arrived_.counter);
}

// Closing oneself is no reason to forget what the other side knows to have arrived.
TEST_P(Goodbye, TheClosingSideCountsWhatHadArrived) {
  arrived_.pair.b.worker->disconnect(arrived_.pair.b.peer, Time::zero()).IgnoreError();
  arrived_.pair.steps(10);
  expect_all_seen(arrived_.pair, arrived_.counter);
}

INSTANTIATE_TEST_SUITE_P(At, Goodbye, testing::Range(0, 64));

}  // namespace
}  // namespace baton
