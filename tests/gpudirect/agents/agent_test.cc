// Agents whose memory is of devices, on one side or both, over every way that it takes: every byte
// is where it should be and no other has changed; fences and ends are those of host memory.
#include "tests/gpudirect/agents/device_agents.h"
#include "tests/std.h"
#include "tests/test.h"

namespace baton::kvtransfer {
namespace {

using ::testing::HasSubstr;

// Between two agents, and of one with itself.
TEST_P(DeviceAgents, EveryPairOfKindsMovesThePagesItNamesAndNoOthers) {
  start();
  if (IsSkipped()) return;
  constexpr size_t kPage = 3001;
  const std::vector<int64_t> from = {5, 0, 255, 17, 18, 19};
  const std::vector<int64_t> to = {9, 200, 1, 100, 101, 102};
  for (const bool with_itself : {false, true}) {
    for (const auto& [near, far] : {std::pair{false, true}, {true, false}, {true, true}}) {
      SCOPED_TRACE(testing::Message() << with_itself << near << far);
      Agent& other = with_itself ? *a_ : *b_;
      const std::unique_ptr<Block> mine = block(near, *a_, 3), theirs = block(far, other, 100);
      if (!with_itself) introduce(*a_, *b_);
      const uint64_t before = a_->stats().worker.staged_transfers;
      const auto local = a_->prepare_local(mine->pages(kPage, 256), mine->kind());
      const auto remote =
          a_->prepare_remote(other.name(), theirs->pages(kPage, 256), theirs->kind());
      ASSERT_TRUE(local.ok() && remote.ok()) << local.status() << remote.status();
      for (const Op op : {Op::kWrite, Op::kRead}) {
        mine->fill(3);
        theirs->fill(100);
        std::vector<std::byte> here = mine->bytes(), there = theirs->bytes();
        for (size_t i = 0; i < from.size(); ++i) {
          std::byte* const a = &here[from[i] * (kBytes / 256)];
          std::byte* const b = &there[to[i] * (kBytes / 256)];
          op == Op::kWrite ? std::copy_n(a, kPage, b) : std::copy_n(b, kPage, a);
        }
        const auto move = must(a_->make_transfer(op, *local, from, *remote, to, "six pages"));
        const absl::Status status = run(move);
        ASSERT_TRUE(status.ok()) << status;
        EXPECT_TRUE(mine->bytes() == here);
        EXPECT_TRUE(theirs->bytes() == there);
        std::vector<AgentMessage> heard;
        run_agents(*a_, *b_, [&] {
          heard = other.messages();
          return !heard.empty();
        });
        EXPECT_EQ(heard[0].payload, "six pages");
        EXPECT_TRUE(a_->release(move).ok());

        // All of it, and without prepared lists.
        const auto whole = must(a_->make_transfer(op, {{mine->whole()}}, {{theirs->whole()}},
                                                  other.name(), {}, theirs->kind(), mine->kind()));
        mine->fill(33);
        const std::vector<std::byte> sent = op == Op::kWrite ? mine->bytes() : theirs->bytes();
        ASSERT_TRUE(run(whole).ok()) << a_->status(whole);
        EXPECT_TRUE(mine->bytes() == sent && theirs->bytes() == sent);
        EXPECT_TRUE(a_->release(whole).ok());
      }
      if (!with_itself && near && far) {
        EXPECT_THAT(a_->explain("beta"), HasSubstr(GetParam().explained));
        const bool staged = std::string_view(GetParam().explained).starts_with("staged");
        EXPECT_EQ(a_->stats().worker.staged_transfers > before, staged) << a_->explain("beta");
      }
      EXPECT_TRUE(a_->release_list(*local).ok());
      EXPECT_TRUE(a_->release_list(*remote).ok());
    }
  }
}

TEST_P(DeviceAgents, BetweenTwoDevices) {
  start({.devices = 2});
  if (IsSkipped()) return;
  const std::unique_ptr<Block> mine = block(true, *a_, 3, kBytes, 1);
  const std::unique_ptr<Block> theirs = block(true, *b_, 100, kBytes, 0);
  introduce(*a_, *b_);
  EXPECT_TRUE(a_->has_remote("beta", {theirs->whole()}, MemoryKind::kVram));
  const Descriptor elsewhere = {theirs->whole().address, theirs->whole().bytes, 1};
  EXPECT_FALSE(a_->has_remote("beta", {elsewhere}, MemoryKind::kVram));
  const auto move = must(a_->make_transfer(Op::kWrite, {{mine->whole()}}, {{theirs->whole()}},
                                           "beta", {}, MemoryKind::kVram, MemoryKind::kVram));
  ASSERT_TRUE(run(move).ok()) << a_->status(move);
  EXPECT_TRUE(theirs->bytes() == mine->bytes());
  EXPECT_TRUE(a_->release(move).ok());
}

TEST_P(DeviceAgents, TheKindIsPartOfWhatARangeIs) {
  start();
  if (IsSkipped()) return;
  const std::unique_ptr<Block> host = block(false, *b_, 1), device = block(true, *b_, 2);
  introduce(*a_, *b_);
  for (const auto& [one, other] :
       {std::pair{host.get(), MemoryKind::kVram}, std::pair{device.get(), MemoryKind::kDram}}) {
    const std::vector<Descriptor> range = {one->whole()};
    EXPECT_TRUE(a_->has_remote("beta", range, one->kind()));
    EXPECT_FALSE(a_->has_remote("beta", range, other));
    EXPECT_TRUE(absl::IsNotFound(a_->prepare_remote("beta", range, other).status()));
    EXPECT_TRUE(absl::IsNotFound(b_->prepare_local(range, other).status()));
    EXPECT_TRUE(absl::IsNotFound(b_->prepare_remote("beta", range, other).status()));
    EXPECT_TRUE(absl::IsNotFound(b_->partial_metadata(range, true, other).status()));
    EXPECT_TRUE(absl::IsNotFound(b_->deregister_memory(range, other)));
    EXPECT_TRUE(b_->prepare_local(range, one->kind()).ok());
  }
  EXPECT_EQ(b_->stats().registered, 2u);
}

TEST_P(DeviceAgents, PartOfTheMetadataAddsRangesOfItsKind) {
  start();
  if (IsSkipped()) return;
  const std::unique_ptr<Block> host = block(false, *b_, 1), device = block(true, *b_, 2);
  const auto told = [&](const Block& what) {
    return a_->add_remote(*b_->partial_metadata({what.whole()}, true, what.kind()));
  };
  const auto knows = [&](const Block& what) {
    return a_->has_remote("beta", {what.whole()}, what.kind());
  };
  ASSERT_TRUE(told(*device).ok());
  EXPECT_TRUE(knows(*device) && !knows(*host));
  ASSERT_TRUE(told(*host).ok());
  ASSERT_TRUE(told(*device).ok()) << "again";
  EXPECT_TRUE(knows(*device) && knows(*host));
  const std::unique_ptr<Block> mine = block(false, *a_, 3);
  const auto read = a_->make_transfer(Op::kRead, {{mine->whole()}}, {{device->whole()}}, "beta", {},
                                      MemoryKind::kVram);
  ASSERT_TRUE(run(*read).ok()) << a_->status(*read);
  EXPECT_TRUE(mine->bytes() == device->bytes());
  EXPECT_TRUE(a_->release(*read).ok());
}

TEST_P(DeviceAgents, ReleaseFencesWhatRuns) {
  for (const size_t rounds : {0, 1, 2, 3, 5, 8, 13, 21}) {
    SCOPED_TRACE(testing::Message() << rounds << " rounds");
    start({.seed = rounds + 1});
    if (IsSkipped()) return;
    {
      const std::unique_ptr<Block> mine = block(true, *a_, 3), theirs = block(true, *b_, 100);
      introduce(*a_, *b_);
      const auto write =
          a_->make_transfer(Op::kWrite, mine->pages(4096, 512), theirs->pages(4096, 512), "beta",
                            "never", MemoryKind::kVram, MemoryKind::kVram);
      ASSERT_TRUE(run(*write).ok()) << a_->status(*write);
      b_->messages();
      ASSERT_TRUE(a_->post(*write).ok());
      EXPECT_TRUE(absl::IsAlreadyExists(a_->post(*write)) ||
                  *a_->state(*write) != AgentTransferState::kRunning);
      for (size_t i = 0; i < rounds; ++i) {
        a_->progress();
        b_->progress();
      }
      const bool running = *a_->state(*write) == AgentTransferState::kRunning;
      if (running) {
        EXPECT_TRUE(
            absl::IsFailedPrecondition(a_->deregister_memory({mine->whole()}, MemoryKind::kVram)));
      }
      ASSERT_TRUE(a_->abort(*write).ok());
      run_agents(*a_, *b_, [&] { return *a_->state(*write) != AgentTransferState::kRunning; });
      if (rounds == 0) {
        EXPECT_TRUE(absl::IsCancelled(a_->status(*write))) << a_->status(*write);
        ASSERT_TRUE(run(*write).ok()) << "it may be posted again: " << a_->status(*write);
      }
      ASSERT_TRUE(a_->release(*write).ok());
      // Every page may be used again at once, on both sides.
      mine->fill(50);
      theirs->fill(60);
      const std::vector<std::byte> here = mine->bytes(), there = theirs->bytes();
      settle();
      EXPECT_TRUE(mine->bytes() == here);
      EXPECT_TRUE(theirs->bytes() == there) << "bytes came after the release";
    }
    TearDown();
  }
}

TEST_P(DeviceAgents, MemoryThatIsGoneUnderAListFailsTheTransfer) {
  start();
  if (IsSkipped()) return;
  const std::unique_ptr<Block> mine = block(true, *a_, 3), theirs = block(true, *b_, 100);
  introduce(*a_, *b_);
  const auto write = a_->make_transfer(Op::kWrite, {{mine->whole()}}, {{theirs->whole()}}, "beta",
                                       {}, MemoryKind::kVram, MemoryKind::kVram);
  ASSERT_TRUE(run(*write).ok()) << a_->status(*write);
  theirs->take_back();
  EXPECT_FALSE(run(*write).ok());
  mine->take_back();
  EXPECT_FALSE(run(*write).ok());
  EXPECT_TRUE(a_->release(*write).ok());
}

INSTANTIATE_TEST_SUITE_P(Ways, DeviceAgents, testing::ValuesIn(kDeviceWays),
                         [](const auto& way) { return std::string(way.param.name); });

}  // namespace
}  // namespace baton::kvtransfer
