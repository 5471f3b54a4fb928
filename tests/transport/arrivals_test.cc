// Arrivals: a transfer completes once, whatever the order and the repeats of its slices.
#include "transport/internal/arrivals.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace baton {
namespace {

Arrival slice(uint32_t slot, uint32_t generation, uint32_t index, uint64_t bytes, uint64_t total,
              std::string_view notify = {}) {
  Arrival out;
  out.transfer = {slot, generation};
  out.slice = index;
  out.slice_bytes = bytes;
  out.total_bytes = total;
  out.notify = notify;
  return out;
}

TEST(Arrivals, CountsShuffledAndRepeatedSlicesOnce) {
  std::mt19937 random(3);
  for (uint32_t generation = 1; generation <= 200; ++generation) {
    internal::Arrivals arrivals;
    std::vector<uint32_t> order;
    for (uint32_t i = 0; i < 20; ++i) order.insert(order.end(), 1 + random() % 3, i);
    std::shuffle(order.begin(), order.end(), random);
    int complete = 0;
    for (uint32_t index : order) {
      auto out = arrivals.add(slice(4, generation, index, 10, 200, index == 19 ? "note" : ""));
      ASSERT_TRUE(out.ok());
      if (!out->now) continue;
      ++complete;
      EXPECT_EQ(out->notify, "note");
    }
    EXPECT_EQ(complete, 1);
    EXPECT_EQ(arrivals.open(), 0u);
  }
}

TEST(Arrivals, EmptyTransfersCompleteAtOnceAndOnce) {
  internal::Arrivals arrivals;
  EXPECT_TRUE(arrivals.add(slice(0, 1, 0, 0, 0, "a"))->now);
  EXPECT_FALSE(arrivals.add(slice(0, 1, 0, 0, 0, "a"))->now);
  EXPECT_TRUE(arrivals.add(slice(0, 2, 0, 0, 0, "b"))->now);
}

TEST(Arrivals, RefusesContradictions) {
  internal::Arrivals arrivals;
  EXPECT_FALSE(arrivals.add(slice(0, 1, 0, 11, 10)).ok());
  EXPECT_FALSE(arrivals.add(slice(0, 1, internal::Arrivals::kMaxSlices, 1, 10)).ok());
  EXPECT_FALSE(arrivals.add(slice(internal::Arrivals::kMaxSlots, 1, 0, 1, 10)).ok());
  ASSERT_TRUE(arrivals.add(slice(0, 1, 0, 6, 10)).ok());
  EXPECT_FALSE(arrivals.add(slice(0, 1, 1, 6, 12)).ok());
  EXPECT_FALSE(arrivals.add(slice(0, 1, 1, 6, 10)).ok());
}

TEST(Arrivals, BoundsWhatAPeerCanLeaveOpen) {
  internal::Arrivals arrivals;
  for (uint32_t i = 0; i < internal::Arrivals::kMaxOpen; ++i) {
    ASSERT_TRUE(arrivals.add(slice(i, 1, 0, 1, 2)).ok());
  }
  EXPECT_EQ(arrivals.open(), internal::Arrivals::kMaxOpen);
  EXPECT_FALSE(arrivals.add(slice(internal::Arrivals::kMaxOpen, 1, 0, 1, 2)).ok());
}

TEST(Arrivals, ACancelledTransferGivesWayToTheNextOfItsSlot) {
  internal::Arrivals arrivals;
  for (uint32_t generation = 1; generation <= 100'000; ++generation) {
    ASSERT_TRUE(arrivals.add(slice(9, generation, 0, 1, 2, "old")).ok());
    ASSERT_EQ(arrivals.open(), 1u);
  }
  auto late = arrivals.add(slice(9, 99'999, 1, 1, 2));  // of one that was given up
  ASSERT_TRUE(late.ok());
  EXPECT_FALSE(late->now);
  auto last = arrivals.add(slice(9, 100'000, 1, 1, 2, "new"));
  ASSERT_TRUE(last.ok());
  EXPECT_TRUE(last->now);
  EXPECT_EQ(last->notify, "new");
  EXPECT_EQ(arrivals.open(), 0u);
}

}  // namespace
}  // namespace baton
