// From a better provider to a worse one and back, again and again, under load: every transfer ends
// as done, each of them counts once, and its bytes are there.
#include "tests/conformance/pluggable.h"
#ifdef BATON_TEST_VERBS
#include "tests/verbs/fake/fake_verbs.h"
#include "verbs/provider.h"
#endif

namespace baton {
namespace {

constexpr size_t kBytes = 4 << 20;
const Time kPatience = until_gives_up();

class Failback : public PluggedPair {
 protected:
  Failback() { settings_ = {{"peer.failback_ms", "10"}}; }
  void start(const ProviderFactory& better) {
    PluggedPair::start(a_, "a", better, "tcp", kBytes);
    PluggedPair::start(b_, "b", better, "tcp", kBytes);
    meet();
  }
  // One after the other, small ones and large ones, until the route is that one and has carried
  // some.
  void carry_until(const std::string& route) {
    const Time end = Clock::steady().now() + kPatience;
    for (int more = 6; more > 0;) {
      const size_t bytes = sent_ % 2 == 0 ? 100 : kBytes;
      const auto fill = std::byte(++sent_ % 251);
      std::fill_n(a_.block.data, bytes, fill);
      const auto id = a_.worker->submit(write(0, bytes)).value();
      until([&] { return ended(*a_.worker->state(id)); });
      ASSERT_TRUE(a_.worker->status(id).ok()) << a_.worker->status(id);
      a_.worker->release(id).IgnoreError();
      until([&] { return b_.worker->counter_value(counter_) >= sent_; });
      ASSERT_EQ(b_.worker->counter_value(counter_), sent_);
      ASSERT_EQ(std::count(b_.block.data, b_.block.data + bytes, fill),
                static_cast<ptrdiff_t>(bytes));
      if (a_.worker->explain(peer_).rfind("b: " + route, 0) == 0) --more;
      ASSERT_LT(Clock::steady().now(), end) << a_.worker->explain(peer_);
    }
  }

  uint64_t sent_ = 0;
};

TEST_F(Failback, FromSharedMemoryToTcpAndBack) {
  Pluggable::Cable cable;
  start(Pluggable::factory(registered("shm"), cable));
  if (std::string route = a_.worker->explain(peer_); route.rfind("b: shm", 0) != 0) {
    GTEST_SKIP() << route;
  }
  for (int time = 0; time < 3 && !HasFatalFailure(); ++time) {
    carry_until("shm");
    cable.in = false;
    carry_until("tcp");
    cable.in = true;
  }
  carry_until("shm");
}

#ifdef BATON_TEST_VERBS
TEST_F(Failback, FromVerbsToTcpAndBack) {
  FakeVerbs fake{{.devices = 1}};
  settings_.emplace_back("verbs.stall_ms", "60000");  // the fake moves when this process runs
  settings_.emplace_back("verbs.port_grace_ms", "5");
  settings_.emplace_back("verbs.hold_ms", "5");
  start(verbs::verbs_over(fake.api()));
  for (int time = 0; time < 3 && !HasFatalFailure(); ++time) {
    carry_until("verbs");
    fake.set_port(0, false);
    carry_until("tcp");
    fake.set_port(0, true);
  }
  carry_until("verbs");
  for (Side* side : {&a_, &b_}) side->end();
  EXPECT_THAT(fake.violations(), testing::IsEmpty());
}
#endif

}  // namespace
}  // namespace baton
