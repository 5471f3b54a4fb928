// From a better provider to a worse one and back, again and again, under load: every transfer ends
// as done, each of them counts once, and its bytes are there.
#include "tests/conformance/pluggable.h"
#include "transport/pool.h"
#include "transport/worker.h"
#ifdef BATON_TEST_VERBS
#include "tests/test.h"
#include "tests/until.h"
#include "tests/verbs/fake/fake_verbs.h"
#include "verbs/provider.h"
#endif

namespace baton {
namespace {

constexpr size_t kBytes = 4 << 20;
const Time kPatience = until_gives_up();

ProviderFactory registered(const std::string& name) {
  for (const auto& [provider, factory] : registered_providers()) {
    if (provider == name) return factory;
  }
  return nullptr;
}

class Failback : public testing::Test {
 protected:
  struct Side {
    std::unique_ptr<Worker> worker;
    std::unique_ptr<MemoryPool> pool;
    Block block;
  };
  void start(Side& side, const std::string& name, const ProviderFactory& better) {
    WorkerOptions options;
    options.name = name;
    options.key = *ClusterKey::from_bytes("a secret of the tests");
    options.providers = {"tcp"};
    options.extra_providers = {better};
    options.settings = settings_;
    auto worker = Worker::create(std::move(options));
    ASSERT_TRUE(worker.ok()) << worker.status();
    side.worker = *std::move(worker);
    side.pool = *MemoryPool::create(*side.worker, {.slab_bytes = kBytes, .huge_pages = false});
    side.block = *side.pool->allocate(kBytes);
  }
  void start(const ProviderFactory& better) {
    start(a_, "a", better);
    start(b_, "b", better);
    if (HasFatalFailure()) return;
    peer_ = *a_.worker->connect(b_.worker->address());
    counter_ = *b_.worker->allocate_counter();
    until([&] { return a_.worker->peer_state(peer_) == PeerState::kUp; });
  }
  template <typename Fact>
  void until(Fact fact, CallSite from = CallSite::here()) {
    const auto turn = [&] {
      a_.worker->progress();
      b_.worker->progress();
    };
    const auto state = [&] {
      return state_of(*a_.worker, peer_, "a") + state_of(b_.worker->stats(), "b");
    };
    baton::until(fact, turn, state, from);
  }
  // One after the other, small ones and large ones, until the route is that one and has carried
  // some.
  void carry_until(const std::string& route) {
    const Time end = Clock::steady().now() + kPatience;
    for (int more = 6; more > 0;) {
      const size_t bytes = sent_ % 2 == 0 ? 100 : kBytes;
      const auto fill = std::byte(++sent_ % 251);
      std::fill_n(a_.block.data, bytes, fill);
      const auto id =
          a_.worker->submit({.peer = peer_,
                             .local = a_.block.region,
                             .local_layout = Layout::contiguous(a_.block.offset, bytes),
                             .remote = *b_.worker->remote_region(b_.block.region),
                             .remote_layout = Layout::contiguous(b_.block.offset, bytes),
                             .counter = b_.worker->remote_counter(counter_),
                             .increment = 1});
      ASSERT_TRUE(id.ok()) << id.status();
      until([&] { return ended(*a_.worker->state(*id)); });
      ASSERT_TRUE(a_.worker->status(*id).ok()) << a_.worker->status(*id);
      a_.worker->release(*id).IgnoreError();
      until([&] { return b_.worker->counter_value(counter_) >= sent_; });
      ASSERT_EQ(b_.worker->counter_value(counter_), sent_);
      ASSERT_EQ(std::count(b_.block.data, b_.block.data + bytes, fill),
                static_cast<ptrdiff_t>(bytes));
      if (a_.worker->explain(peer_).rfind("b: " + route, 0) == 0) --more;
      ASSERT_LT(Clock::steady().now(), end) << a_.worker->explain(peer_);
    }
  }

  std::vector<std::pair<std::string, std::string>> settings_{{"peer.failback_ms", "10"}};
  Side a_, b_;
  PeerId peer_;
  CounterId counter_;
  uint64_t sent_ = 0;
};

TEST_F(Failback, FromSharedMemoryToTcpAndBack) {
  Pluggable::Cable cable;
  start(Pluggable::factory(registered("shm"), cable));
  if (HasFatalFailure()) return;
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
  if (HasFatalFailure()) return;
  for (int time = 0; time < 3 && !HasFatalFailure(); ++time) {
    carry_until("verbs");
    fake.set_port(0, false);
    carry_until("tcp");
    fake.set_port(0, true);
  }
  carry_until("verbs");
  for (Side* side : {&a_, &b_}) {
    side->pool.reset();
    side->worker.reset();
  }
  EXPECT_THAT(fake.violations(), testing::IsEmpty());
}
#endif

}  // namespace
}  // namespace baton
