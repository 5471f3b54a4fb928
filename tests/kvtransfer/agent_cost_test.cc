// What a transfer of many descriptors costs: nothing on the heap for each of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <numeric>
#include <random>

#include "tests/count_allocations.h"
#include "tests/kvtransfer/agent_pair.h"
#include "transport/internal/mapped.h"

namespace baton::kvtransfer {
namespace {

const Time kLong = patient(std::chrono::seconds(60));

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
  const auto write = s.a->make_transfer(Op::kWrite, *local, absl::MakeSpan(s.from).first(count),
                                        *remote, absl::MakeSpan(s.to).first(count));
  EXPECT_TRUE(write.ok()) << write.status();
  uint64_t fewest = UINT64_MAX;
  for (int round = 0; round < 20; ++round) {
    const uint64_t before = allocations;
    EXPECT_TRUE(s.a->post(*write).ok());
    EXPECT_TRUE(s.a->wait(*write, kLong).ok());
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
  const auto write = s.a->make_transfer(Op::kRead, *local, s.from, *remote, s.to);
  EXPECT_LE(allocations - before, 40u);
  ASSERT_TRUE(write.ok());
  // A regular list is one segment.
  const uint64_t listing = allocations;
  ASSERT_TRUE(s.a->prepare_local(s.here).ok());
  EXPECT_LE(allocations - listing, 20u);
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
  // Of this thread alone: others may have the machine too.
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

// Likewise: ranges registered, and deregistered, in one call.
TEST(AgentCost, DISABLED_TimesOfManyRanges) {
  constexpr size_t kRanges = 10'000;
  const std::unique_ptr<Agent> agent = make_agent(agent_options("alpha"));
  std::vector<uint8_t> memory(kRanges * 64);
  std::vector<Descriptor> ranges;
  for (size_t i = 0; i < kRanges; ++i) {
    ranges.push_back({reinterpret_cast<uint64_t>(memory.data()) + i * 64, 64, 0});
  }
  const auto timed = [&](const char* what, auto&& f) {
    const Time begin = Clock::steady().now();
    EXPECT_TRUE(f().ok());
    std::printf("%-28s %8.2f ms\n", what,
                static_cast<double>((Clock::steady().now() - begin).count()) / 1e6);
  };
  for (const char* order : {"rising", "falling", "shuffled"}) {
    if (*order == 'f') std::reverse(ranges.begin(), ranges.end());
    if (*order == 's') std::shuffle(ranges.begin(), ranges.end(), std::mt19937(5));
    timed(order, [&] { return agent->register_memory(ranges); });
    timed("  and back", [&] { return agent->deregister_memory(ranges); });
  }
}

}  // namespace
}  // namespace baton::kvtransfer
