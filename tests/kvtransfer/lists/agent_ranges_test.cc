// Tables of registered ranges: what covers a descriptor, which of repeated ranges is meant, and
// what it costs to have many of them come and go.
#include "kvtransfer/internal/agent_ranges.h"
#include "tests/test.h"

namespace baton::kvtransfer {
namespace {

using Numbers = AgentRanges<int>;

TEST(AgentRanges, OverlappingRangesCoverWhatAnyOfThemDoes) {
  Numbers ranges = Numbers().with({{{1000, 9000, 0}, 0},  // the long one begins first
                                   {{2000, 10, 0}, 1},
                                   {{3000, 10, 0}, 2},
                                   {{3000, 10, 0}, 3}});
  EXPECT_EQ(ranges.cover(3005, 100, 0, nullptr)->region, 0);
  EXPECT_EQ(ranges.cover(3005, 5, 0, nullptr)->region, 3);
  EXPECT_EQ(ranges.cover(3005, 5, 1, nullptr), nullptr);
  EXPECT_EQ(ranges.cover(999, 1, 0, nullptr), nullptr);
  EXPECT_EQ(ranges.cover(9999, 2, 0, nullptr), nullptr);
  ranges = ranges.without({*ranges.find({1000, 9000, 0})});
  EXPECT_EQ(ranges.cover(3005, 100, 0, nullptr), nullptr);
  ASSERT_TRUE(ranges.find({3000, 10, 0}).has_value());
  EXPECT_FALSE(ranges.find({3000, 11, 0}).has_value());
}

TEST(AgentRanges, TheNewestOfEqualRangesIsFoundFirst) {
  const Descriptor one = {100, 10, 0};
  const Descriptor other = {100, 10, 7};
  const Numbers ranges =
      Numbers().with({{one, 1}, {other, 2}}).with({{one, 3}, {{100, 9, 0}, 4}, {one, 5}});
  const auto number = [&](size_t place) {
    return place == Numbers::kNone ? 0 : ranges[place].region;
  };
  std::vector<int> found;
  for (const size_t place : ranges.find_all({one, other, one, other, one, one})) {
    found.push_back(number(place));
  }
  EXPECT_EQ(found, (std::vector<int>{5, 2, 3, 0, 1, 0}));
  EXPECT_EQ(number(*ranges.find(one, 2)), 1);
  EXPECT_FALSE(ranges.find(one, 3).has_value());
}

// Against a table that is searched from end to end.
TEST(AgentRanges, WhateverComesAndGoesIsFoundAsASearchFindsIt) {
  std::mt19937 random(11);
  const auto some = [&](uint64_t most) { return uint64_t{random()} % most; };
  Numbers ranges;
  std::vector<Numbers::Range> plain;  // the newest last
  for (int round = 0; round < 200; ++round) {
    std::vector<Numbers::Range> added(some(6));
    for (auto& range : added)
      range = {{some(40), 1 + some(12), some(2)}, static_cast<int>(random())};
    ranges = ranges.with(added);
    plain.insert(plain.end(), added.begin(), added.end());
    std::vector<Descriptor> list;
    for (uint64_t i = some(5); i > 0 && !plain.empty(); --i) {
      list.push_back(plain[some(plain.size())].where);
    }
    std::vector<size_t> places = ranges.find_all(list);
    std::vector<size_t> gone;
    for (size_t i = 0; i < list.size(); ++i) {
      const auto at = std::find_if(plain.rbegin(), plain.rend(),
                                   [&](const auto& range) { return range.where == list[i]; });
      ASSERT_EQ(places[i] == Numbers::kNone, at == plain.rend());
      if (at == plain.rend()) continue;
      ASSERT_EQ(ranges[places[i]].region, at->region);
      gone.push_back(places[i]);
      plain.erase(std::next(at).base());
    }
    ranges = ranges.without(gone);
    ASSERT_EQ(ranges.size(), plain.size());
    for (int look = 0; look < 20; ++look) {
      const Descriptor wanted = {some(50), some(14), some(2)};
      const bool covered = std::any_of(plain.begin(), plain.end(), [&](const auto& range) {
        return range.where.device == wanted.device && range.where.address <= wanted.address &&
               range.where.address + range.where.bytes >= wanted.address + wanted.bytes;
      });
      EXPECT_EQ(ranges.cover(wanted.address, wanted.bytes, wanted.device, nullptr) != nullptr,
                covered);
    }
  }
}

// A region that counts how often one is put somewhere.
uint64_t moves = 0;
struct Counted {
  Counted() = default;
  Counted(const Counted& other) : number(other.number) { ++moves; }
  Counted& operator=(const Counted& other) {
    number = other.number;
    ++moves;
    return *this;
  }
  int number = 0;
};

TEST(AgentRanges, ManyAreAddedAndTakenAwayInFewSteps) {
  using Table = AgentRanges<Counted>;
  constexpr uint64_t kRanges = 10'000;
  constexpr uint64_t kFew = 3 * kRanges * std::bit_width(kRanges);
  for (const char* order : {"rising", "falling", "shuffled", "all the same"}) {
    SCOPED_TRACE(order);
    std::vector<Descriptor> list;
    for (uint64_t i = 0; i < kRanges; ++i) list.push_back({*order == 'a' ? 0 : i * 64, 64, 0});
    if (*order == 'f') std::reverse(list.begin(), list.end());
    if (*order == 's') std::shuffle(list.begin(), list.end(), std::mt19937(5));
    std::vector<Table::Range> added(kRanges);
    for (size_t i = 0; i < kRanges; ++i) added[i].where = list[i];
    moves = 0;
    const Table many = Table().with(std::move(added));
    EXPECT_LT(moves, kFew);
    EXPECT_EQ(many.size(), kRanges);
    moves = 0;
    EXPECT_EQ(many.without(many.find_all(list)).size(), 0u);
    EXPECT_LT(moves, kFew);
  }
}

}  // namespace
}  // namespace baton::kvtransfer
