// A worker that sleeps on its descriptor is woken by whatever comes, also by what came just before.
#include <poll.h>

#include "tests/conformance/harness.h"

namespace baton {
namespace {

class Sleeps : public Conformance {
 protected:
  // Runs progress() of b only when arm() or the descriptor says that there is something to do.
  void drive_a_and_wake_b(const std::function<bool()>& ready, CallSite from = CallSite::here()) {
    const auto turn = [&] {
      a_.worker->progress();
      pollfd poll_b{.fd = b_.worker->wait_fd(), .events = POLLIN, .revents = 0};
      if (!b_.worker->arm() || poll(&poll_b, 1, 1) > 0) b_.worker->progress();
    };
    baton::until(
        ready, turn, [&] { return state(); }, from);
  }
};

TEST_P(Sleeps, AWorkerIsWokenByEveryTransfer) {
  if (sim()) GTEST_SKIP() << "in virtual time nobody sleeps";
  for (int round = 0, all = rounds(50); round < all; ++round) {
    SCOPED_TRACE(testing::Message() << "round " << round);
    TransferRequest put = request(Op::kWrite, a_, b_, 0, 100'000);
    put.notify = "look";
    const TransferId id = submit(a_, put);
    if (round % 2 == 0) {  // on its way before b lies down, or after
      for (int i = 0; i < 20; ++i) a_.worker->progress();
    }
    Notification note;
    drive_a_and_wake_b([&] { return b_.worker->next_notification(note); });
    EXPECT_EQ(note.payload, "look");
    drive_a_and_wake_b([&] { return ended(a_, id); });
    EXPECT_TRUE(finish(a_, id).ok());
  }
}

INSTANTIATE_TEST_SUITE_P(Conformance, Sleeps, testing::ValuesIn(all_variants()),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace baton
