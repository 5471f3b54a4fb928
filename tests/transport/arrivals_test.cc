// Arrivals: a transfer completes once, whatever the order and the repeats of its slices.
#include "transport/internal/tables/arrivals.h"
#include "tests/test.h"

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
      auto out =
          arrivals.add(slice(4, generation, index, 10, 200, index == 19 ? "note" : "")).value();
      if (!out.now) continue;
      ++complete;
      EXPECT_EQ(out.notify, "note");
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
  for (uint32_t i = 0; i < internal::Arrivals::kMaxSlots; ++i) {
    for (uint32_t generation = 1; generation <= 10; ++generation) {
      ASSERT_TRUE(arrivals.add(slice(i, generation, 0, 1, 2)).ok());
    }
  }
  EXPECT_EQ(arrivals.open(), internal::Arrivals::kMaxOpen);
  EXPECT_FALSE(arrivals.add(slice(internal::Arrivals::kMaxSlots, 1, 0, 1, 2)).ok());
}

TEST(Arrivals, ACancelledTransferGivesWayToALaterOneOfItsSlot) {
  constexpr uint32_t kLast = 100'000, kPlaces = internal::Arrivals::kOpenPerSlot;
  internal::Arrivals arrivals;
  for (uint32_t generation = 1; generation <= kLast; ++generation) {
    ASSERT_TRUE(arrivals.add(slice(9, generation, 0, 1, 2, "old")).ok());
    ASSERT_LE(arrivals.open(), kPlaces);
  }
  auto late = arrivals.add(slice(9, kLast - kPlaces, 1, 1, 2));  // of one that was given up
  ASSERT_TRUE(late.ok());
  EXPECT_FALSE(late->now);
  auto last = arrivals.add(slice(9, kLast, 1, 1, 2, "new")).value();
  EXPECT_TRUE(last.now);
  EXPECT_EQ(last.notify, "new");
  EXPECT_EQ(arrivals.open(), kPlaces - 1);
}

// Two rails, looked at one after the other: what came over the first is told of late.
// Promise(transfers): A counter and a notification arrive even if the next transfer of their slot
//   was heard of first | the target remembers the last 32 transfers of each slot
TEST(Arrivals, ATransferThatItsSlotsNextOneOvertookStillCounts) {
  internal::Arrivals arrivals;
  EXPECT_TRUE(arrivals.add(slice(3, 7, 0, 5, 5))->now);
  EXPECT_TRUE(arrivals.add(slice(3, 6, 0, 5, 5, "late"))->now);
  EXPECT_FALSE(arrivals.add(slice(3, 6, 0, 5, 5, "late"))->now);
  EXPECT_FALSE(arrivals.add(slice(3, 7, 0, 5, 5))->now);
  // In slices.
  EXPECT_FALSE(arrivals.add(slice(3, 9, 1, 5, 10))->now);
  EXPECT_FALSE(arrivals.add(slice(3, 8, 0, 5, 10))->now);
  EXPECT_TRUE(arrivals.add(slice(3, 9, 0, 5, 10))->now);
  EXPECT_TRUE(arrivals.add(slice(3, 8, 1, 5, 10))->now);
  EXPECT_EQ(arrivals.open(), 0u);
}

TEST(Arrivals, EachGenerationCountsOnceInAnyOrder) {
  std::mt19937 random(5);
  for (uint32_t first : {1U, 1000U, UINT32_MAX - 20}) {  // generations wrap around
    internal::Arrivals arrivals;
    std::vector<uint32_t> order;
    for (uint32_t i = 0; i < 300; ++i) order.push_back(i);
    for (uint32_t i = 0; i + 20 <= 300; i += 20) {
      std::shuffle(order.begin() + i, order.begin() + i + 20, random);
    }
    int complete = 0;
    for (uint32_t i : order) {
      const uint32_t generation = first + i;
      if (generation == 0) continue;
      for (int again = 0; again < 3; ++again) {
        complete += arrivals.add(slice(1, generation, 0, 4, 4))->now ? 1 : 0;
      }
    }
    EXPECT_EQ(complete, first == UINT32_MAX - 20 ? 299 : 300);
  }
}

// A peer may begin as many transfers as it has slots, and no more notifications than it has credit
// for.
TEST(Arrivals, KeepsNoMoreTextThanThereIsCreditFor) {
  internal::Arrivals arrivals;
  const std::string text(60'000, 'x');
  const auto begun = [&](uint32_t slot, uint32_t generation) {
    return arrivals
        .add({.transfer = {slot, generation}, .slice_bytes = 1, .total_bytes = 2, .notify = text})
        .status();
  };
  // What has arrived costs nothing more, whoever has its place then.
  for (uint32_t generation = 1; generation < 20; ++generation) {
    ASSERT_TRUE(begun(0, generation).ok());
    const auto ended =
        arrivals.add({.transfer = {0, generation}, .slice = 1, .slice_bytes = 1, .total_bytes = 2});
    ASSERT_TRUE(ended.ok() && ended->now);
    EXPECT_EQ(ended->notify, text);
    EXPECT_EQ(arrivals.text(), 0u);
  }
  // Nor does what is given up for the next one.
  for (uint32_t generation = 20; generation < 1000; ++generation) {
    ASSERT_TRUE(begun(0, generation).ok());
    EXPECT_LE(arrivals.text(), internal::Arrivals::kOpenPerSlot * text.size());
  }
  uint32_t slot = 1;
  while (slot < internal::Arrivals::kMaxSlots && begun(slot, 1).ok()) ++slot;
  EXPECT_GT(slot * text.size(), 12u << 20);
  EXPECT_LT(slot * text.size(), 20u << 20);
  EXPECT_TRUE(absl::IsInvalidArgument(begun(slot + 1, 1)));
}

}  // namespace
}  // namespace baton
