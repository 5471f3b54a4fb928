// How far workers are from each other, and who is picked for it.
#include "engine/router/distance.h"

#include "engine/router/worker_picker.h"
#include "tests/test.h"

namespace baton::engine::router {
namespace {

TEST(Distance, CountsTheWayUpToWherePathsPart) {
  EXPECT_EQ(distance("h1", "h1"), 0);
  EXPECT_EQ(distance("h1", "h2"), 1);
  EXPECT_EQ(distance("rack1/h1", "rack1/h2"), 1);
  EXPECT_EQ(distance("rack1/h1", "rack2/h1"), 2);
  EXPECT_EQ(distance("east/rack1/h1", "west/rack1/h1"), 3);
  EXPECT_EQ(distance("rack1", "rack1/h2"), 1);
  EXPECT_EQ(distance("h9", "east/rack1/h1"), 3);
}

TEST(Distance, CostsTwiceAsMuchForEachPartFurtherUp) {
  EXPECT_EQ(move_cost(0, 0.125), 0);
  EXPECT_EQ(move_cost(1, 0.125), 0.125);
  EXPECT_EQ(move_cost(3, 0.125), 0.5);
  EXPECT_EQ(move_cost(7, 0.125), 8);
  EXPECT_EQ(move_cost(1000, 0.125), 8);
  EXPECT_EQ(move_cost(3, 0), 0);
}

TEST(Distance, PlacesArePaths) {
  for (const char* good : {"h", "10.0.0.1", "east/rack_7/h-1"}) EXPECT_TRUE(is_place(good)) << good;
  for (const char* bad : {"", "/", "a/", "/a", "a//b", "a b", "http://h:1", "\xff"}) {
    EXPECT_FALSE(is_place(bad)) << bad;
  }
  EXPECT_TRUE(is_place(std::string(128, 'a')));
  EXPECT_FALSE(is_place(std::string(129, 'a')));
}

TEST(Distance, IsWeighedAgainstWhatThereIsToDo) {
  WorkerPicker picker(2);
  EXPECT_TRUE(picker.tell(0, {.snapshot = true}));
  EXPECT_TRUE(picker.tell(1, {.snapshot = true}));
  const auto key = std::make_shared<PromptKey>(token_key(std::vector<int32_t>(1000, 1)));
  const std::vector<double> near_second = {125, 0};
  const auto first = picker.pick(key, {}, std::nullopt, near_second);
  EXPECT_EQ(first->worker, 1u);
  EXPECT_EQ(first->missing, 1000u);
  // 125 tokens of way are less than what the other one has still to compute.
  const auto other = std::make_shared<PromptKey>(token_key(std::vector<int32_t>(1000, 2)));
  EXPECT_EQ(picker.pick(other, {}, std::nullopt, near_second)->worker, 0u);
}

TEST(Distance, DecidesAmongEqualsWhereNobodyTells) {
  WorkerPicker picker(3);
  const std::vector<double> near_last = {2, 1, 0};
  const auto none = std::make_shared<PromptKey>();
  EXPECT_EQ(picker.pick(none, {}, std::nullopt, near_last)->worker, 2u);
  EXPECT_EQ(picker.pick(none, {}, std::nullopt, near_last)->worker, 1u);  // the last one is busy
}

}  // namespace
}  // namespace baton::engine::router
