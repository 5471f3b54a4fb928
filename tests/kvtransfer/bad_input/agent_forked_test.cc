// An agent in a forked child: every call is refused there, and says why; nothing happens to the
// parent's, nor to those that it is connected to.
#include "kvtransfer/agent.h"
#include "kvtransfer/agent_kv.h"
#include "tests/kvtransfer/agent_pair.h"
#include "tests/test.h"
#include "transport/base/unique_fd.h"

namespace baton::kvtransfer {
namespace {

// Counts what a child is asked; `wrong` is the number of the first that was not as it should be.
struct Asked {
  void is(bool right) {
    ++count;
    if (!right && wrong == 0) wrong = count;
  }
  void refused(const absl::Status& status) {
    is(absl::IsInvalidArgument(status) &&
       status.message().find("the agent belongs to the process") != std::string_view::npos);
  }
  int count = 0, wrong = 0;
};

// Without threads: a sanitizer's locks are nobody's when the child is made.
struct AgentForked : ::testing::Test {
  AgentForked() {
    introduce(*a, *b);
    introduce(*b, *a);
    const KvShape shape{
        .layers = 1, .blocks = 1, .block_tokens = 1, .total_heads = 1, .heads = 1, .head_size = 8};
    const KvLayout layout =
        KvLayout::paged(shape, KvLayout::Order::kNhd, KvLayout::Pair::kInBlock, false);
    here = *KvPlacement::of(layout, {mine.whole()});
    there = *KvPlacement::of(layout, {theirs.whole()});
    plan.emplace(*AgentKvPlan::make(*a, Op::kWrite, here, "beta", there));
  }
  std::unique_ptr<Agent> a = make_agent(agent_options("alpha", "tcp", false));
  std::unique_ptr<Agent> b = make_agent(agent_options("beta", "tcp", false));
  AgentMemory mine{*a, 4096, 1}, theirs{*b, 4096, 2};
  KvPlacement here, there;
  std::optional<AgentKvPlan> plan;
};

TEST_F(AgentForked, EveryCallIsRefused) {
  const auto local = a->prepare_local({mine.whole()});
  const auto remote = a->prepare_remote("beta", {theirs.whole()});
  const auto write = must(a->make_transfer(Op::kWrite, *local, {0}, *remote, {0}, "words"));
  const auto done = [&] {
    run_agents(*a, *b, [&] { return *a->state(write) != AgentTransferState::kRunning; });
    return a->status(write);
  };
  ASSERT_TRUE(a->post(write).ok());
  ASSERT_TRUE(done().ok());
  ASSERT_TRUE(b->notify("alpha", "for the parent").ok());
  run_agents(*a, *b, [&] { return a->stats().worker.notifications_waiting == 1; });
  const std::string metadata = *b->metadata();
  const base::UniqueFd file(
      static_cast<int>(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING)));
  ASSERT_EQ(ftruncate(file.get(), 4096), 0);
  ASSERT_EQ(fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
  void* const mapped = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  const Descriptor of_file{reinterpret_cast<uint64_t>(mapped), 4096, 0};

  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    Asked asked;
    asked.refused(a->register_memory({mine.whole()}));
    asked.refused(a->register_mapped(of_file, file.get(), 0));
    asked.refused(a->register_rows({{mine.address(), 8, 0, 8, 8}}).status());
    asked.refused(a->deregister_memory({mine.whole()}));
    asked.refused(a->metadata().status());  // 5
    asked.refused(a->partial_metadata({mine.whole()}, true).status());
    asked.refused(a->add_remote(metadata).status());
    asked.is(!a->has_remote("beta"));
    asked.refused(a->fetch_metadata("beta", "127.0.0.1:1"));
    asked.refused(a->send_metadata("127.0.0.1:1"));  // 10
    asked.refused(a->invalidate_metadata("127.0.0.1:1"));
    asked.refused(a->connect("beta"));
    asked.is(a->explain("beta").find("forked") != std::string::npos);
    asked.refused(a->prepare_local({mine.whole()}).status());
    asked.refused(a->prepare_remote("beta", {theirs.whole()}).status());  // 15
    asked.refused(a->make_transfer(Op::kWrite, *local, {0}, *remote, {0}).status());
    asked.refused(a->make_transfer(Op::kWrite, {mine.whole()}, {theirs.whole()}, "beta").status());
    asked.refused(a->release_list(*local));
    asked.refused(a->post(write));
    asked.refused(a->state(write).status());  // 20
    asked.refused(a->local_free(write).status());
    asked.refused(a->status(write));
    asked.refused(a->outcome(write).status());
    asked.refused(a->wait(write, Time::zero()));
    asked.refused(a->run(write, Time::zero()));  // 25
    asked.refused(a->abort(write));
    asked.refused(a->telemetry(write).status());
    asked.refused(a->release(write, Time::zero()));
    asked.refused(a->notify("beta", "of the child"));
    asked.is(a->messages().empty());  // 30
    asked.is(a->wait_messages(Time::zero(), 1).empty());
    asked.is(a->lost_messages().empty());
    asked.is(a->event_fd() == -1);
    asked.is(a->stats().lists == 0 && a->stats().registered == 0);
    asked.refused(a->publish_metadata());  // 35
    asked.refused(AgentKvPlan::make(*a, Op::kWrite, here, "beta", there).status());
    asked.refused(plan->make_transfer(*a, {.local = {{{}}}, .remote = {{{}}}}).status());
    a->remove_remote("beta");
    a->abandon(write);
    a = nullptr;
    _exit(asked.wrong);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status)) << status;
  EXPECT_EQ(WEXITSTATUS(status), 0) << "the number of the call";
  // The parent has heard nothing of it.
  ASSERT_TRUE(a->post(write).ok());
  EXPECT_TRUE(done().ok()) << done();
  const std::vector<AgentMessage> heard = a->messages();
  ASSERT_EQ(heard.size(), 1u);
  EXPECT_EQ(heard[0].payload, "for the parent");
  munmap(mapped, 4096);
}

}  // namespace
}  // namespace baton::kvtransfer
