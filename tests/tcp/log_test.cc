// What a worker tells its log: peers up and down with the route, memory.
#include "tests/captured_log.h"
#include "tests/test.h"
#include "tests/until.h"
#include "transport/worker.h"

namespace baton {
namespace {

using testing::AllOf;
using testing::Contains;
using testing::HasSubstr;
using testing::Not;

class WorkerLog : public testing::Test {
 protected:
  static std::unique_ptr<Worker> worker(const std::string& name, const std::string& secret) {
    return Worker::create(
               {.name = name, .providers = {"tcp"}, .key = *ClusterKey::from_bytes(secret)})
        .value();
  }
  // Runs both, on this thread, until `ready`.
  template <typename Fact>
  static void until(Worker& a, Worker& b, Fact fact, CallSite from = CallSite::here()) {
    const auto state = [&] { return state_of(a.stats(), "a") + state_of(b.stats(), "b"); };
    baton::until(
        fact, [&] { a.progress(), b.progress(); }, state, from);
  }

  CapturedLog log_{base::LogLevel::kDebug};
  const std::vector<std::string>& lines_ = log_.lines;
};

TEST_F(WorkerLog, TellsPeersUpAndDownWithTheirRoute) {
  const auto a = worker("alice", "0123456789abcdef"), b = worker("bob", "0123456789abcdef");
  const auto peer = must(a->connect(b->address()));
  until(*a, *b, [&] { return a->stats().peers_up == 1 && b->stats().peers_up == 1; });
  EXPECT_THAT(lines_,
              Contains(AllOf(HasSubstr("alice: peer up: bob: tcp"), HasSubstr("127.0.0.1"))));
  EXPECT_THAT(lines_, Contains(HasSubstr("bob: peer up: alice: tcp")));
  a->disconnect(peer, Time::zero()).IgnoreError();
  until(*b, *a, [&] { return b->stats().peers_up == 0; });
  EXPECT_THAT(lines_,
              Contains(HasSubstr("alice: peer down: bob: this side closed the connection")));
  EXPECT_THAT(lines_, Contains(HasSubstr("bob: peer down: alice: ")));
  EXPECT_THAT(lines_, Not(Contains(HasSubstr("warning"))));
  EXPECT_EQ(a->stats().handshakes_refused + b->stats().handshakes_refused, 0u);
}

}  // namespace
}  // namespace baton
