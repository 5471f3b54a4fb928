// What a transfer of many descriptors costs: nothing on the heap for each of them.
#include <ctime>

#include "kvtransfer/agent_kv.h"
#include "tests/count_allocations.h"
#include "tests/kvtransfer/agent_pair.h"
#include "tests/test.h"
#include "transport/internal/mapped.h"

namespace baton::kvtransfer {
namespace {

const Time kLong = until_gives_up();

struct Scattered {
  explicit Scattered(size_t pages, size_t page) {
    mine.emplace(*a, pages * page, 1);
    theirs.emplace(*b, pages * page, 2);
    introduce(*a, *b);
    from.resize(pages);
    std::iota(from.begin(), from.end(), 0);
    to = from;
    std::mt19937 random(7);
    std::shuffle(from.begin(), from.end(), random);
    std::shuffle(to.begin(), to.end(), random);
    here = mine->pages(page, pages);
    there = theirs->pages(page, pages);
  }
  std::unique_ptr<Agent> a = make_agent(agent_options("alpha"));
  std::unique_ptr<Agent> b = make_agent(agent_options("beta"));
  std::optional<AgentMemory> mine, theirs;
  std::vector<Descriptor> here, there;
  std::vector<int64_t> from, to;
};

// Allocations on all threads, from post() to the end.
uint64_t allocations_of_a_post(Scattered& s, size_t count) {
  const auto local = s.a->prepare_local(s.here);
  const auto remote = s.a->prepare_remote("beta", s.there);
  const auto write =
      must(s.a->make_transfer(Op::kWrite, *local, absl::MakeSpan(s.from).first(count), *remote,
                              absl::MakeSpan(s.to).first(count)));
  uint64_t fewest = UINT64_MAX;
  for (int round = 0; round < 20; ++round) {
    const uint64_t before = allocations;
    EXPECT_TRUE(s.a->post(write).ok());
    EXPECT_TRUE(s.a->wait(write, kLong).ok());
    fewest = std::min(fewest, allocations - before);
  }
  return fewest;
}

TEST(AgentCost, PostingAllocatesNothingForADescriptor) {
  Scattered s(32'768, 256);
  const uint64_t of_one = allocations_of_a_post(s, 1);
  const uint64_t of_all = allocations_of_a_post(s, 32'768);
  EXPECT_LE(of_all, of_one + 2);
  EXPECT_LE(of_all, 8u);
}

TEST(AgentCost, MakingATransferAllocatesAFewTimesWhateverItsNumber) {
  Scattered s(32'768, 64);
  const auto local = s.a->prepare_local(s.here);
  const auto remote = s.a->prepare_remote("beta", s.there);
  const uint64_t before = allocations;
  must(s.a->make_transfer(Op::kRead, *local, s.from, *remote, s.to));
  EXPECT_LE(allocations - before, 40u);
  // A regular list is one segment.
  const uint64_t listing = allocations;
  ASSERT_TRUE(s.a->prepare_local(s.here).ok());
  EXPECT_LE(allocations - listing, 20u);
}

// A layer's blocks of 8 heads into those of one rank of two, of 4 heads, in other blocks.
struct Planned {
  explicit Planned(uint32_t blocks) {
    KvShape shape{.layers = 4,
                  .blocks = blocks,
                  .block_tokens = 4,
                  .total_heads = 8,
                  .heads = 8,
                  .head_size = 4};
    const auto source =
        KvLayout::paged(shape, KvLayout::Order::kNhd, KvLayout::Pair::kInBlock, false);
    shape.heads = 4;
    shape.blocks = blocks / 2;
    shape.block_tokens = 8;
    const auto target =
        KvLayout::paged(shape, KvLayout::Order::kHnd, KvLayout::Pair::kInBlock, false);
    mine.emplace(*a, source.buffers[0].bytes, 1);
    theirs.emplace(*b, target.buffers[0].bytes, 2);
    introduce(*a, *b);
    plan = AgentKvPlan::make(*a, Op::kWrite, *KvPlacement::of(source, {mine->whole()}), "beta",
                             *KvPlacement::of(target, {theirs->whole()}));
    from.resize(blocks);
    std::iota(from.begin(), from.end(), 0);
    to.assign(from.begin(), from.begin() + blocks / 2);
    std::mt19937 random(7);
    std::shuffle(from.begin(), from.end(), random);
    std::shuffle(to.begin(), to.end(), random);
  }
  // Of the first `count` blocks, of which the target's are twice as large.
  absl::StatusOr<AgentTransferId> transfer(size_t count) {
    return plan->make_transfer(*a, {.local = {{absl::MakeSpan(from).first(count)}},
                                    .remote = {{absl::MakeSpan(to).first(count / 2)}}});
  }
  std::unique_ptr<Agent> a = make_agent(agent_options("alpha"));
  std::unique_ptr<Agent> b = make_agent(agent_options("beta"));
  std::optional<AgentMemory> mine, theirs;
  absl::StatusOr<AgentKvPlan> plan;
  std::vector<int64_t> from, to;
};

TEST(AgentCost, PostingAPlanAllocatesNothingForABlock) {
  Planned p(4096);
  ASSERT_TRUE(p.plan.ok()) << p.plan.status();
  const auto fewest = [&](size_t blocks) {
    const uint64_t making = allocations;
    const auto write = must(p.transfer(blocks));
    EXPECT_LE(allocations - making, 40u);
    uint64_t out = UINT64_MAX;
    for (int round = 0; round < 20; ++round) {
      const uint64_t before = allocations;
      EXPECT_TRUE(p.a->post(write).ok());
      EXPECT_TRUE(p.a->wait(write, kLong).ok());
      out = std::min(out, allocations - before);
    }
    return out;
  };
  const uint64_t of_two = fewest(2);
  const uint64_t of_all = fewest(4096);
  EXPECT_LE(of_all, of_two + 2);
  EXPECT_LE(of_all, 16u);
}

TEST(AgentCost, RegisteringManyRangesReadsTheMappingsOnce) {
  const std::unique_ptr<Agent> agent = make_agent(agent_options("alpha"));
  std::vector<uint8_t> memory(1000 * 64);
  std::vector<Descriptor> ranges;
  for (size_t i = 0; i < 1000; ++i) {
    ranges.push_back({reinterpret_cast<uint64_t>(memory.data()) + i * 64, 64, 0});
  }
  const uint64_t before = internal::looks_at_mappings();
  ASSERT_TRUE(agent->register_memory(ranges).ok());
  EXPECT_EQ(internal::looks_at_mappings() - before, 1u);
}

// By hand: agent_cost_test --gtest_also_run_disabled_tests
TEST(AgentCost, DISABLED_Times) {
  Scattered s(32'768, 1024);
  // CPU time of this thread alone: other programs may use the machine too.
  const auto now = [] {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return Time(std::chrono::seconds(time.tv_sec)) + std::chrono::nanoseconds(time.tv_nsec);
  };
  const auto say = [](const char* what, Time best, size_t per) {
    std::printf("%-28s %8.2f us %8.2f ns each\n", what, best.count() / 1e3,
                static_cast<double>(best.count()) / static_cast<double>(per));
  };
  const auto best_of = [&](auto&& f) {
    Time best = kNever;
    for (int i = 0; i < 30; ++i) {
      const Time begin = now();
      f();
      best = std::min(best, now() - begin);
    }
    return best;
  };
  std::vector<Descriptor> irregular = s.here;
  std::shuffle(irregular.begin(), irregular.end(), std::mt19937(3));
  say("prepare, regular", best_of([&] { s.a->prepare_local(s.here).IgnoreError(); }), 32'768);
  say("prepare, irregular", best_of([&] { s.a->prepare_local(irregular).IgnoreError(); }), 32'768);
  const auto local = s.a->prepare_local(s.here);
  const auto odd = s.a->prepare_local(irregular);
  const auto remote = s.a->prepare_remote("beta", s.there);
  AgentTransferId write;
  say("make_transfer",
      best_of([&] { write = *s.a->make_transfer(Op::kWrite, *local, s.from, *remote, s.to); }),
      32'768);
  say("make_transfer, irregular",
      best_of([&] { s.a->make_transfer(Op::kWrite, *odd, s.from, *remote, s.to).IgnoreError(); }),
      32'768);
  const auto post = [&](AgentTransferId transfer) {
    Time best = kNever;
    for (int round = 0; round < 30; ++round) {
      const Time begin = now();
      EXPECT_TRUE(s.a->post(transfer).ok());
      best = std::min(best, now() - begin);
      EXPECT_TRUE(s.a->wait(transfer, kLong).ok());
    }
    return best;
  };
  say("post", post(write), 32'768);
  say("post of one descriptor", post(*s.a->make_transfer(Op::kWrite, *local, {7}, *remote, {9})),
      1);
}

}  // namespace
}  // namespace baton::kvtransfer
