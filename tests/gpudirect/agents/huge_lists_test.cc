// Lists of very many pages of memory of devices, and lists that are wrong: each is refused in one
// line, or moves what it names.
#include "tests/gpudirect/agents/device_agents.h"
#include "tests/sanitized.h"
#include "tests/std.h"

namespace baton::kvtransfer {
namespace {

constexpr size_t kHugePage = 16;

class HugeLists : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    a_ = device_agent("alpha", GetParam());
    b_ = device_agent("beta", GetParam());
  }
  void TearDown() override {
    a_.reset();
    b_.reset();
    driver_.expect_clean();
  }
  absl::Status run(AgentTransferId id) {
    if (absl::Status status = a_->post(id); !status.ok()) return status;
    run_agents(*a_, *b_, [&] { return *a_->state(id) != AgentTransferState::kRunning; });
    return a_->status(id);
  }
  InstalledFake driver_{{.memory_bytes = size_t{1} << 30}};
  std::unique_ptr<Agent> a_, b_;
};

// With BATON_CASES=all ten million. Pages are there as often as it takes, each in another order on
// the two sides, so that none merge.
TEST_P(HugeLists, MoveEachPage) {
  const char* const cases = std::getenv("BATON_CASES");
  const bool all = cases != nullptr && std::string_view(cases) == "all";
  const size_t count = all ? 10'000'000 : kSanitized ? 5'000 : 30'000;
  const size_t bytes = 1 << 20, pages = std::min(count, bytes / kHugePage);
  Block mine(Block::Of::kSlab, *a_, driver_, bytes, 3),
      theirs(Block::Of::kSlab, *b_, driver_, bytes, 9);
  introduce(*a_, *b_);
  std::vector<Descriptor> from(count), to(count);
  for (size_t i = 0; i < count; ++i) {
    from[i] = {mine.whole().address + i % pages * kHugePage, kHugePage, 0};
    to[i] = {theirs.whole().address + (pages - 1 - i % pages) * kHugePage, kHugePage, 0};
  }
  const auto near = a_->prepare_local(from, MemoryKind::kVram);
  ASSERT_TRUE(near.ok()) << near.status();
  const auto far = a_->prepare_remote("beta", to, MemoryKind::kVram);
  ASSERT_TRUE(far.ok()) << far.status();
  std::vector<int64_t> indices(count);
  std::iota(indices.begin(), indices.end(), 0);
  const auto short_of_one = absl::MakeConstSpan(indices).first(count - 1);
  EXPECT_TRUE(absl::IsInvalidArgument(
      a_->make_transfer(Op::kWrite, *near, indices, *far, short_of_one).status()));
  const auto id = a_->make_transfer(Op::kWrite, *near, indices, *far, indices);
  ASSERT_TRUE(id.ok()) << id.status();
  const absl::Status status = run(*id);
  ASSERT_TRUE(status.ok()) << status;
  const std::vector<std::byte> sent = mine.bytes(), got = theirs.bytes();
  for (size_t page = 0; page < pages; ++page) {
    ASSERT_EQ(std::memcmp(&sent[page * kHugePage], &got[(pages - 1 - page) * kHugePage], kHugePage),
              0)
        << page;
  }
  EXPECT_TRUE(a_->release(*id).ok());
  EXPECT_TRUE(a_->release_list(*near).ok());
  EXPECT_TRUE(a_->release_list(*far).ok());
}

INSTANTIATE_TEST_SUITE_P(Over, HugeLists, testing::Values("shm", "tcp"),
                         [](const auto& each) { return std::string(each.param); });

}  // namespace
}  // namespace baton::kvtransfer
