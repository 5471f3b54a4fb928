// Prepared lists and the layouts that are made from two of them, against the descriptors
// themselves.
#include "kvtransfer/internal/agent_plan.h"
#include "tests/fails_with.h"
#include "tests/test.h"

namespace baton::kvtransfer {
namespace {

using ::testing::HasSubstr;
// (local region, offset, remote region, offset) of every byte or, of long descriptors, every 64th.
using Bytes = std::multiset<std::tuple<uint32_t, uint64_t, uint32_t, uint64_t>>;

MemoryRegion local_region(uint32_t index, uint64_t bytes) {
  return {.size = bytes, .index = index, .generation = index + 1};
}
RemoteRegion remote_region(uint32_t index, uint64_t bytes) {
  return {.key = 7, .size = bytes, .index = index, .generation = index + 1};
}

struct Sides {
  AgentRanges<MemoryRegion> local;
  AgentRanges<RemoteRegion> remote;

  AgentList here(const std::vector<Descriptor>& list) const {
    return must(make_agent_list(local, absl::MakeConstSpan(list), "me"));
  }
  AgentList there(const std::vector<Descriptor>& list) const {
    return must(make_agent_list(remote, absl::MakeConstSpan(list), "peer"));
  }
};

// Regions of 1 MiB, region i at address (i + 1) << 32 here and (i + 101) << 32 there.
constexpr uint64_t kRegion = 1 << 20;
uint64_t here(uint64_t region, uint64_t offset) { return ((region + 1) << 32) + offset; }
uint64_t there(uint64_t region, uint64_t offset) { return ((region + 101) << 32) + offset; }
Sides some_regions(uint32_t count, uint64_t bytes = kRegion) {
  std::vector<AgentRanges<MemoryRegion>::Range> local;
  std::vector<AgentRanges<RemoteRegion>::Range> remote;
  for (uint32_t i = 0; i < count; ++i) {
    local.push_back({{here(i, 0), bytes, 0}, local_region(i, bytes)});
    remote.push_back({{there(i, 0), bytes, 0}, remote_region(i, bytes)});
  }
  Sides out;
  out.local = out.local.with(local);
  out.remote = out.remote.with(remote);
  return out;
}

Bytes walked(const AgentPlan& plan, uint64_t grain) {
  Bytes out;
  for (const AgentPart& part : plan.parts) {
    const size_t bytes = part.local_layout.bytes();
    EXPECT_EQ(part.remote_layout.bytes(), bytes);
    EXPECT_TRUE(part.local_layout.check(part.local.size, "local").ok());
    EXPECT_TRUE(part.remote_layout.check(part.remote.size, "remote").ok());
    TransferCursor cursor(part.local_layout, part.remote_layout, 0, bytes);
    for (Piece piece; cursor.next(piece);) {
      for (uint64_t at = 0; at < piece.bytes; at += grain) {
        out.emplace(part.local.index, piece.local_offset + at, part.remote.index,
                    piece.remote_offset + at);
      }
    }
  }
  return out;
}

Bytes wanted(const std::vector<Descriptor>& local, const std::vector<Descriptor>& remote,
             uint64_t grain) {
  Bytes out;
  for (size_t i = 0; i < local.size(); ++i) {
    for (uint64_t at = 0; at < local[i].bytes; at += grain) {
      const uint64_t a = local[i].address + at;
      const uint64_t b = remote[i].address + at;
      out.emplace((a >> 32) - 1, a & UINT32_MAX, (b >> 32) - 101, b & UINT32_MAX);
    }
  }
  return out;
}

TEST(AgentList, RowsCountTheirDescriptorsInOrder) {
  const Sides sides = some_regions(2);
  const std::vector<StridedDescriptor> rows = {
      {here(0, 100), 16, 0, 64, 10}, {here(1, 0), 32, 0, 32, 1}, {here(1, 4096), 16, 0, 16, 100}};
  const auto list = must(make_agent_list(sides.local, absl::MakeConstSpan(rows), "me"));
  ASSERT_EQ(list.size(), 111u);
  EXPECT_EQ(list.at(9).offset, 100u + 9 * 64);
  EXPECT_EQ(list.at(10).segment->bytes, 32u);
  EXPECT_EQ(list.at(11).offset, 4096u);
  EXPECT_EQ(list.at(110).offset, 4096u + 99 * 16);
}

TEST(StridedDescriptors, CoverWhatIsFromTheFirstByteToTheLast) {
  EXPECT_EQ((StridedDescriptor{100, 8, 3, 64, 10}.span()), (Descriptor{100, 9 * 64 + 8, 3}));
  EXPECT_EQ((StridedDescriptor{100, 8, 3, UINT64_MAX, 1}.span()), (Descriptor{100, 8, 3}));
  EXPECT_EQ((StridedDescriptor{100, 0, 3, 0, UINT64_MAX}.span()), (Descriptor{100, 0, 3}));
  EXPECT_EQ((StridedDescriptor{UINT64_MAX - 8, 8, 0, 8, 1}.span()),
            (Descriptor{UINT64_MAX - 8, 8, 0}));
  EXPECT_EQ((StridedDescriptor{100, 8, 0, 64, 0}.span()), std::nullopt) << "nothing";
  EXPECT_EQ((StridedDescriptor{100, 8, 0, 0, 0}.span()), std::nullopt) << "nothing at one place";
  EXPECT_EQ((StridedDescriptor{0, 8, 0, UINT64_MAX / 2, 4}.span()), std::nullopt) << "product";
  EXPECT_EQ((StridedDescriptor{0, 8, 0, UINT64_MAX, 2}.span()), std::nullopt) << "sum";
  EXPECT_EQ((StridedDescriptor{UINT64_MAX - 8, 8, 0, 2, 2}.span()), std::nullopt) << "its end";
}

TEST(AgentList, WhatMakesNoSenseIsRefusedByNumber) {
  const Sides sides = some_regions(1);
  const auto refused = [&](const std::vector<Descriptor>& list) {
    return make_agent_list(sides.local, absl::MakeConstSpan(list), "me").status();
  };
  EXPECT_TRUE(absl::IsInvalidArgument(refused({})));
  const absl::Status outside = refused({{here(0, 0), 8, 0}, {here(0, kRegion - 4), 8, 0}});
  EXPECT_THAT(outside, fails_with(Code::kNotFound, {"descriptor 1"}));
  EXPECT_TRUE(absl::IsNotFound(refused({{here(0, 0), 8, 1}}))) << "another device";
  EXPECT_TRUE(absl::IsNotFound(refused({{here(0, 8), UINT64_MAX, 0}}))) << "wraps round";
  EXPECT_TRUE(absl::IsNotFound(refused({{here(0, 0) - 1, 8, 0}})));
}

TEST(AgentPlan, NeighboursOnBothSidesAreMerged) {
  const Sides sides = some_regions(1);
  const std::vector<StridedDescriptor> mine = {{here(0, 0), 256, 0, 256, 100}};
  const std::vector<StridedDescriptor> theirs = {{there(0, 512), 256, 0, 256, 100}};
  const auto a = make_agent_list(sides.local, absl::MakeConstSpan(mine), "me");
  const auto b = make_agent_list(sides.remote, absl::MakeConstSpan(theirs), "peer");
  const auto all = must(plan_agent_transfer(*a, *b));
  EXPECT_EQ(all.descriptors, 1u);
  EXPECT_TRUE(all.parts[0].local_layout.dims().empty()) << "one run";
  const auto some = must(plan_agent_transfer(*a, {4, 5, 6, 9, 10}, *b, {4, 5, 6, 9, 10}));
  EXPECT_EQ(some.descriptors, 2u);
}

TEST(AgentPlan, IndicesAreCheckedAndSizesToo) {
  const Sides sides = some_regions(1);
  const AgentList mine = sides.here({{here(0, 0), 8, 0}, {here(0, 100), 16, 0}});
  const AgentList theirs = sides.there({{there(0, 0), 8, 0}, {there(0, 100), 16, 0}});
  const auto refused = [&](const std::vector<int64_t>& a, const std::vector<int64_t>& b) {
    const absl::Status status = plan_agent_transfer(mine, a, theirs, b).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(refused({0}, {0, 1}), HasSubstr("1 local indices, but 2 remote"));
  EXPECT_THAT(refused({}, {}), HasSubstr("no descriptors"));
  EXPECT_THAT(refused({0, 2}, {0, 1}), HasSubstr("local index 1 is 2"));
  EXPECT_THAT(refused({0}, {-1}), HasSubstr("remote index 0 is -1"));
  EXPECT_THAT(refused({0}, {int64_t{1} << 32}), HasSubstr("4294967296"));
  EXPECT_THAT(refused({0}, {1}), HasSubstr("has 8 bytes, remote descriptor 1 has 16"));
  EXPECT_TRUE(absl::IsInvalidArgument(
      plan_agent_transfer(mine, sides.there({{there(0, 0), 8, 0}})).status()));
}

// Promise(agents): A list of any sizes and addresses moves exactly the bytes that it names | pairs
//   are sorted into layouts of equal sizes
TEST(AgentPlan, RandomPairsMoveEachByteOnce) {
  std::mt19937_64 random(20261122);
  const auto below = [&](uint64_t n) { return random() % n; };
  for (int round = 0; round < 300; ++round) {
    const auto regions = static_cast<uint32_t>(1 + below(4));
    const Sides sides = some_regions(regions);
    // Few sizes, or as many as there are descriptors; aligned, or anywhere.
    const uint64_t sizes = below(2) == 0 ? 1 + below(4) : 1000;
    const uint64_t align = uint64_t{1} << below(7);
    const uint64_t count = 1 + below(60);
    std::vector<Descriptor> mine, theirs;
    for (uint64_t i = 0; i < count; ++i) {
      const uint64_t bytes = (1 + below(sizes)) * (sizes == 1000 ? 1 : align);
      mine.push_back({here(below(regions), below(4000) * align), bytes, 0});
      theirs.push_back({there(below(regions), below(4000) * align), bytes, 0});
      if (below(2) == 0) {  // a neighbour
        mine.push_back({mine.back().address + bytes, bytes, 0});
        theirs.push_back({theirs.back().address + bytes, bytes, 0});
      }
    }
    const auto plan = must(plan_agent_transfer(sides.here(mine), sides.there(theirs)));
    EXPECT_LE(plan.parts.size(), 64u * regions * regions);
    ASSERT_EQ(walked(plan, 1), wanted(mine, theirs, 1)) << "round " << round;
  }
}

TEST(AgentPlan, OddAddressesMoreThanFourGigabytesApart) {
  const uint64_t huge = uint64_t{3} << 32;
  Sides sides;
  sides.local = sides.local.with({{{1, huge, 0}, local_region(0, huge)}});
  sides.remote = sides.remote.with({{{1, huge, 0}, remote_region(0, huge)}});
  std::vector<Descriptor> mine, theirs;
  for (uint64_t i = 0; i < 30; ++i) {
    mine.push_back({1 + i * 429'496'701 + i % 7, 3, 0});
    theirs.push_back({1 + (29 - i) * 429'496'703 + i % 5, 3, 0});
  }
  const auto plan = must(plan_agent_transfer(sides.here(mine), sides.there(theirs)));
  Bytes expected;
  for (size_t i = 0; i < mine.size(); ++i) {
    for (uint64_t at = 0; at < 3; ++at) {
      expected.emplace(0, mine[i].address - 1 + at, 0, theirs[i].address - 1 + at);
    }
  }
  EXPECT_GT(plan.parts.size(), 1u);
  EXPECT_EQ(walked(plan, 1), expected);
}

// Of no regularity: 32 bytes each in the list, 8 in the plan, and one part.
TEST(AgentPlan, TenMillionDescriptorsAnywhere) {
  constexpr uint64_t kMany = 10'000'000;
  const Sides sides = some_regions(1);
  std::vector<Descriptor> mine(kMany);
  uint64_t at = 1;
  for (Descriptor& one : mine) {
    at = (at * 1'103'515'245 + 12'345) % (kRegion / 2);
    one = {here(0, at), 8, 0};
  }
  const std::vector<StridedDescriptor> theirs = {{there(0, 0), 8, 0, 8, kRegion / 8}};
  const auto b = must(make_agent_list(sides.remote, absl::MakeConstSpan(theirs), "peer"));
  std::vector<int64_t> from(kMany), to(kMany);
  for (uint64_t i = 0; i < kMany; ++i) {
    from[i] = static_cast<int64_t>(kMany - 1 - i);
    to[i] = static_cast<int64_t>(i * 7919 % b.size());
  }
  const AgentList a = sides.here(mine);
  ASSERT_EQ(a.size(), kMany);
  const auto plan = must(plan_agent_transfer(a, from, b, to));
  EXPECT_EQ(plan.bytes, 8 * kMany);
  ASSERT_EQ(plan.parts.size(), 1u);
  EXPECT_EQ(plan.pages[0].capacity() + plan.pages[1].capacity(), 2 * kMany) << "4 bytes each";
  from.back() = kMany;
  EXPECT_THAT(plan_agent_transfer(a, from, b, to).status().message(),
              HasSubstr("local index 9999999 is 10000000"));
  mine.back().address = here(0, kRegion);
  EXPECT_THAT(make_agent_list(sides.local, absl::MakeConstSpan(mine), "me").status(),
              fails_with(Code::kNotFound, {"descriptor 9999999"}));
}

}  // namespace
}  // namespace baton::kvtransfer
