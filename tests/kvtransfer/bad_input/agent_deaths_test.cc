// The other agent's process dies in each phase of a transfer with it: before the first post,
// between two, in flight and before its message. Over shm, tcp and ucx.
#include "absl/strings/escaping.h"
#include "tests/kvtransfer/agent_pair.h"
#include "tests/peer_process.h"
#include "tests/test.h"
#include "tests/usable_provider.h"

namespace baton::kvtransfer {
namespace {

constexpr size_t kDeathPage = 4096, kDeathPages = 256;
const Time kUntilDeath = until_gives_up();

class AgentDeath : public OverEveryProvider<std::string> {
 protected:
  void SetUp() override {
    OverEveryProvider::SetUp();
    if (IsSkipped()) return;
    peer_.emplace(AGENT_PEER, GetParam().c_str());
    AgentOptions options = agent_options("a", GetParam());
    options.worker.key = std::nullopt;  // the user's, as the peer has it
    agent_ = make_agent(std::move(options));
    must(agent_->add_remote(absl::HexStringToBytes(peer_->line())));
    const uint64_t far = std::strtoull(peer_->line().c_str(), nullptr, 10);
    mine_.emplace(*agent_, kDeathPage * kDeathPages, 3);
    const auto rows = [](uint64_t address) {
      return std::vector<StridedDescriptor>{{address, kDeathPage, 0, kDeathPage, kDeathPages}};
    };
    local_ = *agent_->prepare_local(rows(mine_->address()));
    remote_ = *agent_->prepare_remote("b", rows(far));
    fill(7);
  }
  AgentTransferId make(Op op, std::string_view message = {}) {
    std::vector<int64_t> all(kDeathPages);
    std::iota(all.begin(), all.end(), 0);
    return must(agent_->make_transfer(op, local_, all, remote_, all, message));
  }
  absl::Status run(AgentTransferId id) {
    if (absl::Status status = agent_->post(id); !status.ok()) return status;
    return agent_->wait(id, kUntilDeath);
  }
  void fill(uint8_t byte) { std::fill(mine_->bytes.begin(), mine_->bytes.end(), byte); }
  bool is(uint8_t byte) const {
    return std::all_of(mine_->bytes.begin(), mine_->bytes.end(),
                       [byte](uint8_t each) { return each == byte; });
  }
  static void expect_lost(const absl::Status& end) {
    EXPECT_TRUE(absl::IsUnavailable(end)) << end;
    EXPECT_GT(end.message().size(), 20u) << end;
  }

  std::optional<PeerProcess> peer_;
  std::optional<AgentMemory> mine_;
  std::unique_ptr<Agent> agent_;
  AgentListId local_, remote_;
};

TEST_P(AgentDeath, BeforeTheFirstPost) {
  const AgentTransferId read = make(Op::kRead);
  peer_->kill_it();
  expect_lost(run(read));
  EXPECT_TRUE(is(7));
  EXPECT_TRUE(agent_->release(read, kUntilDeath).ok());
}

TEST_P(AgentDeath, BetweenTwoPosts) {
  const AgentTransferId read = make(Op::kRead);
  ASSERT_EQ(run(read), absl::OkStatus());
  for (size_t page = 0; page < kDeathPages; ++page) {
    EXPECT_EQ(mine_->bytes[page * kDeathPage + 9], page);
  }
  peer_->kill_it();
  fill(7);
  absl::Status end;
  until(
      [&] { return !(end = run(read)).ok(); });  // over shm its pages are there until it is missed
  expect_lost(end);
  for (size_t page = 0; page < kDeathPages; ++page) {  // as it was, or as it was there
    const auto first = mine_->bytes.begin() + static_cast<ptrdiff_t>(page * kDeathPage);
    EXPECT_TRUE(
        std::all_of(first, first + kDeathPage, [&](uint8_t byte) { return byte == *first; }));
  }
  EXPECT_FALSE(agent_->has_remote("b"));
  for (int i = 0; i < 3; ++i) {  // each calls it once more
    expect_lost(agent_->notify("b", "are you there?"));
    EXPECT_FALSE(agent_->has_remote("b"));
  }
}

TEST_P(AgentDeath, InFlightAndBeforeTheMessage) {
  const AgentTransferId read = make(Op::kRead, "read"), write = make(Op::kWrite, "written");
  ASSERT_EQ(run(read), absl::OkStatus());
  peer_->stop();
  for (const AgentTransferId id : {read, write}) ASSERT_EQ(agent_->post(id), absl::OkStatus());
  peer_->kill_it();
  for (const AgentTransferId id : {read, write}) {
    const absl::Status end = agent_->wait(id, kUntilDeath);
    if (!end.ok() || GetParam() == "tcp") expect_lost(end);  // nobody is needed there over shm
    const absl::Status released = agent_->release(id, kUntilDeath);
    EXPECT_TRUE(released.ok() || absl::IsUnavailable(released)) << released;
  }
  fill(9);  // fenced: nothing comes any more
  run_agents(*agent_, *agent_, [&] { return !agent_->has_remote("b"); });
  EXPECT_TRUE(is(9));
  EXPECT_EQ(agent_->stats().running + agent_->stats().transfers, 0u);
}

INSTANTIATE_TEST_SUITE_P(Providers, AgentDeath, ::testing::Values("shm", "tcp", "ucx"),
                         [](const auto& param) { return param.param; });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(AgentDeath);

}  // namespace
}  // namespace baton::kvtransfer
