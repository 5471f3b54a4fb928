// The same with one agent: two threads, all of its calls, agents that come and go.
#include "kvtransfer/agent.h"
#include "tests/hostile/any_thread.h"
#include "tests/kvtransfer/agent_pair.h"
#include "tests/sanitized.h"
#include "tests/seeds.h"
#include "tests/test.h"
#include "tests/usable_provider.h"

namespace baton::kvtransfer {
namespace {

using hostile::Dice;
using hostile::Pile;
using std::chrono::microseconds;

constexpr size_t kThreads = 2;
constexpr size_t kPages = 64;
constexpr size_t kPage = 1024;
const Time kLong = until_gives_up();

class AnyThreadOfAnAgent : public OverEveryProvider<std::string> {
 protected:
  void SetUp() override {
    OverEveryProvider::SetUp();
    if (IsSkipped()) return;
    AgentOptions options = agent_options("everybodys", provider());
    options.serve_metadata = provider() == "tcp";
    agent_ = make_agent(std::move(options));
    other_ = make_agent(agent_options("other", provider()));
    mine_.emplace(*agent_, kPages * kPage, 3);
    theirs_.emplace(*other_, kPages * kPage, 7);
    ASSERT_EQ(introduce(*agent_, *other_), "other");
    ASSERT_EQ(introduce(*other_, *agent_), "everybodys");
  }

  void live(Dice dice, size_t steps) {
    for (size_t step = 0; step < steps; ++step) act(dice);
    while (const auto id = transfers_.take(dice)) {
      const absl::Status gone = agent_->release(*id, kLong);
      EXPECT_TRUE(gone.ok() || absl::IsNotFound(gone)) << gone;
    }
    while (const auto id = lists_.take(dice)) agent_->release_list(*id).IgnoreError();
  }

  void act(Dice& dice) {
    switch (dice.below(17)) {
      case 0:
      case 1:
        return make(dice);
      case 2:
      case 3:
        if (const auto id = transfers_.look(dice)) {
          const std::string_view words = "posted again";
          agent_->post(*id, dice.one_in(2) ? &words : nullptr).IgnoreError();
        }
        return;
      case 4:
        if (const auto id = transfers_.look(dice)) {
          agent_->wait(*id, microseconds(dice.below(1000))).IgnoreError();
        }
        return;
      case 5:
        if (const auto id = transfers_.look(dice)) {
          agent_->state(*id).status().IgnoreError();
          agent_->status(*id).IgnoreError();
          agent_->telemetry(*id).status().IgnoreError();
        }
        return;
      case 6:
        if (const auto id = transfers_.look(dice)) agent_->abort(*id).IgnoreError();
        return;
      case 7:
        if (const auto id = transfers_.take(dice)) {
          const absl::Status gone = agent_->release(*id, kLong);
          EXPECT_TRUE(gone.ok() || absl::IsNotFound(gone)) << gone;
        }
        return;
      case 8:
        if (const auto id = transfers_.take(dice)) agent_->abandon(*id);
        return;
      case 9:
        agent_->notify("other", std::string(dice.below(200), 'n')).IgnoreError();
        agent_->messages();
        other_->messages();
        return;
      case 10:
        if (const auto id = lists_.take(dice)) {
          EXPECT_TRUE(agent_->release_list(*id).ok());
        }
        return;
      case 11: {
        AgentMemory more(*agent_, 64, 1);
        EXPECT_TRUE(agent_->metadata().ok());
        EXPECT_TRUE(agent_->partial_metadata({{more.whole()}}, dice.one_in(2)).ok());
        EXPECT_TRUE(agent_->deregister_memory({{more.whole()}}).ok());
        return;
      }
      case 12:
        introduce(*agent_, *other_);
        agent_->has_remote("other", {{theirs_->whole()}});
        return;
      case 13:
        if (dice.one_in(6)) visit(dice);
        return;
      case 14:
        if (dice.one_in(10)) agent_->remove_remote("other");
        introduce(*agent_, *other_);
        return;
      case 15:
        agent_->stats();
        agent_->explain("other");
        agent_->connect("other").IgnoreError();
        agent_->progress();
        return;
      default:
        if (provider() != "tcp") return;
        other_->fetch_metadata("everybodys", "127.0.0.1:" + std::to_string(agent_->port()))
            .IgnoreError();
        other_->send_metadata("127.0.0.1:" + std::to_string(agent_->port())).IgnoreError();
        if (dice.one_in(4)) {
          other_->invalidate_metadata("127.0.0.1:" + std::to_string(agent_->port())).IgnoreError();
        }
    }
  }

  void make(Dice& dice) {
    const size_t page = dice.below(kPages);
    if (dice.one_in(2)) {
      const auto id = agent_->make_transfer(
          dice.one_in(2) ? Op::kRead : Op::kWrite, {{{mine_->address(page * kPage), kPage, 0}}},
          {{{theirs_->address(page * kPage), kPage, 0}}}, "other", "made");
      if (id.ok()) transfers_.add(*id);
      return;
    }
    const auto local = agent_->prepare_local(mine_->pages(kPage, kPages)).value();
    const auto remote = agent_->prepare_remote("other", theirs_->pages(kPage, kPages));
    lists_.add(local);
    if (!remote.ok()) return;  // it has just been removed
    lists_.add(*remote);
    const auto at = static_cast<int64_t>(page);
    const auto id = agent_->make_transfer(Op::kWrite, local, {at}, *remote, {at}, "listed");
    if (id.ok()) transfers_.add(*id);
  }

  // An agent that comes, moves something, and goes while its transfer may still run.
  void visit(Dice& dice) {
    const std::string name = "guest-" + std::to_string(dice.below(3));  // some share a name
    auto guest = make_agent(agent_options(name, provider()));
    AgentMemory memory(*guest, kPage, 9);
    introduce(*agent_, *guest);
    introduce(*guest, *agent_);
    const auto out = agent_->make_transfer(Op::kRead, {{{mine_->address(), kPage, 0}}},
                                           {{memory.whole()}}, name);
    if (out.ok()) {
      agent_->post(*out).IgnoreError();  // a guest of its name may have come in between
      transfers_.add(*out);
    }
    guest->notify("everybodys", "hello").IgnoreError();
    if (dice.one_in(2)) agent_->remove_remote(name);
    guest.reset();  // before its memory
  }

  std::unique_ptr<Agent> agent_, other_;
  std::optional<AgentMemory> mine_, theirs_;
  Pile<AgentTransferId> transfers_;
  Pile<AgentListId> lists_;
};

TEST_P(AnyThreadOfAnAgent, MayDoAnythingWithIt) {
  const uint64_t seed = number_of("BATON_SEED", 1);
  SCOPED_TRACE("BATON_SEED=" + std::to_string(seed));
  const auto steps = static_cast<size_t>(rounds_of(1000, 200));
  std::vector<std::thread> threads;
  for (size_t number = 0; number < kThreads; ++number) {
    threads.emplace_back([&, number] { live(Dice(seed * 1000 + number), steps); });
  }
  for (std::thread& thread : threads) thread.join();
  // When all that was posted is gone, the memory is nobody else's.
  until([&] { return agent_->deregister_memory({{mine_->whole()}}).ok(); });
  EXPECT_EQ(agent_->stats().transfers, 0u);
  EXPECT_EQ(agent_->stats().lists, 0u);
}

INSTANTIATE_TEST_SUITE_P(Providers, AnyThreadOfAnAgent, testing::Values("shm", "tcp"),
                         [](const auto& each) { return each.param; });

}  // namespace
}  // namespace baton::kvtransfer
