// Tables of registered ranges: what covers a descriptor, which of repeated ranges is meant, and
// what it costs to have many of them come and go.
#include "kvtransfer/internal/agent_ranges.h"
#include "tests/test.h"

namespace baton::kvtransfer {
namespace {

using Numbers = AgentRanges<int>;

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
