// Plans of agents that requantise by the processor, into and out of memory that is not there any
// more, or may not be written: the transfer fails, and the process goes on.
#include "kvtransfer/agent_kv.h"
#include "tests/kvtransfer/agent_pair.h"
#include "tests/kvtransfer/requantise/fp8_layout.h"
#include "tests/test.h"

namespace baton::kvtransfer {
namespace {

// A cache in pages of its own.
class MappedCache {
 public:
  MappedCache(Agent& agent, const KvLayout& layout, int rights = PROT_READ | PROT_WRITE)
      : agent_(agent) {
    for (const KvBuffer& buffer : layout.buffers) {
      void* const data = mmap(nullptr, buffer.bytes, rights, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      EXPECT_NE(data, MAP_FAILED);
      ranges_.push_back({reinterpret_cast<uint64_t>(data), buffer.bytes, 0});
    }
    EXPECT_TRUE(agent.register_memory(ranges_).ok());
    place = *KvPlacement::of(layout, ranges_);
  }
  ~MappedCache() {
    EXPECT_TRUE(agent_.deregister_memory(ranges_).ok());
    unmap();
  }
  MappedCache(const MappedCache&) = delete;
  MappedCache& operator=(const MappedCache&) = delete;
  void unmap() {
    if (mapped_) {
      for (const Descriptor& range : ranges_) {
        munmap(reinterpret_cast<void*>(range.address), range.bytes);
      }
    }
    mapped_ = false;
  }

  KvPlacement place;

 private:
  Agent& agent_;
  std::vector<Descriptor> ranges_;
  bool mapped_ = true;
};

TEST(AgentRequantise, MemoryThatIsGoneOrReadOnlyFailsTheTransfer) {
  const auto a = make_agent(agent_options("alpha", "tcp"));
  const auto b = make_agent(agent_options("beta", "tcp"));
  const KvShape shape{
      .layers = 1, .blocks = 40, .block_tokens = 16, .total_heads = 4, .heads = 4, .head_size = 64};
  const KvLayout bf16 =
      KvLayout::paged(shape, KvLayout::Order::kNhd, KvLayout::Pair::kStacked, true);
  const KvLayout fp8 = fp8_layout(shape, KvLayout::Order::kNhd, 1);
  std::vector<int64_t> blocks(40);
  std::iota(blocks.begin(), blocks.end(), 0);
  for (const Op op : {Op::kWrite, Op::kRead}) {
    const bool writes = op == Op::kWrite;
    const MappedCache theirs(*b, writes ? fp8 : bf16);
    introduce(*a, *b);
    const auto run = [&](MappedCache& mine, bool gone) {
      const auto plan = AgentKvPlan::make_requantising(*a, op, mine.place, "beta", theirs.place);
      EXPECT_TRUE(plan.ok()) << plan.status();
      const auto id = plan->make_transfer(*a, {.local = {{blocks}}, .remote = {{blocks}}});
      EXPECT_TRUE(id.ok()) << id.status();
      if (gone) mine.unmap();
      return a->run(*id, patient(std::chrono::seconds(60)));
    };
    const auto expect_refused = [&](MappedCache& mine, bool gone) {
      const absl::Status ended = run(mine, gone);
      EXPECT_TRUE(absl::IsFailedPrecondition(ended)) << ended;
      EXPECT_THAT(std::string(ended.message()), testing::HasSubstr("no longer mapped"));
    };
    {
      MappedCache mine(*a, writes ? bf16 : fp8);
      expect_refused(mine, true);
    }
    if (!writes) {
      MappedCache mine(*a, fp8, PROT_READ);
      expect_refused(mine, false);
    }
    MappedCache mine(*a, writes ? bf16 : fp8);
    EXPECT_TRUE(run(mine, false).ok());
  }
}

}  // namespace
}  // namespace baton::kvtransfer
