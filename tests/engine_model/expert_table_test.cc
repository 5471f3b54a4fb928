// Which experts tokens choose, and how they are listed by expert.
#include "engine/kernels/expert_table.h"

#include "engine/kernels/elementwise.h"
#include "tests/engine_model/reference_kernels.h"
#include "tests/test.h"

namespace baton::engine {
namespace {

using Row = std::vector<float>;
using Chosen = std::vector<std::pair<int, float>>;  // expert, weight

void write(ExpertTable& table, const std::vector<Row>& rows) {
  for (size_t t = 0; t < rows.size(); ++t) {
    std::copy(rows[t].begin(), rows[t].end(), table.logits() + t * table.stride());
  }
}

// What each token chose, as the groups have it.
std::vector<Chosen> choose(ExpertTable& table, const std::vector<Row>& rows) {
  write(table, rows);
  for (size_t t = 0; t < rows.size(); ++t) table.choose(static_cast<int>(t), 0);
  table.group(static_cast<int>(rows.size()));
  std::vector<Chosen> chosen(rows.size());
  int next = 0, before = -1;
  for (const ExpertTable::Group& group : table.groups()) {
    EXPECT_EQ(group.first, next);
    EXPECT_GT(group.expert, before);
    EXPECT_GT(group.count, 0);
    for (int i = 0; i < group.count; ++i) {
      const ExpertTable::Slot& slot = table.slot(group.first + i);
      chosen[static_cast<size_t>(slot.token)].emplace_back(group.expert, slot.weight);
    }
    next += group.count;
    before = group.expert;
  }
  EXPECT_EQ(next, table.slots());
  // A token's experts are listed, and so added up, in ascending number, as the groups are.
  for (int t = 0; t < static_cast<int>(rows.size()); ++t) {
    for (int i = 1; i < table.per_token(); ++i) EXPECT_GT(table.place(t, i), table.place(t, i - 1));
  }
  return chosen;
}

std::vector<Row> random_rows(int tokens, int experts, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<Row> rows(static_cast<size_t>(tokens), Row(static_cast<size_t>(experts)));
  for (Row& row : rows) {
    for (float& x : row) x = static_cast<float>(int(random() % 20001) - 10000) / 1000.0f;
  }
  return rows;
}

TEST(Softmax, MatchesItsReference) {
  for (const int size : {16, 32, 128, 1008}) {
    Row x = random_rows(1, size, 1)[0];
    x[3] = -std::numeric_limits<float>::infinity();
    Row expected = x;
    softmax(x.data(), size);
    reference_softmax(expected.data(), size);
    for (size_t i = 0; i < x.size(); ++i) ASSERT_NEAR(x[i], expected[i], 1e-6) << i;
    EXPECT_EQ(x[3], 0.0f);
  }
}

TEST(AddScaled, RoundsOnce) {
  const Row x = random_rows(1, 48, 2)[0];
  Row y = random_rows(1, 48, 3)[0], expected = y;
  for (size_t i = 0; i < y.size(); ++i) expected[i] = std::fma(x[i], 0.3f, expected[i]);
  add_scaled(x.data(), 0.3f, y.data(), 48);
  EXPECT_EQ(y, expected);
}

TEST(ExpertTable, TakesTheMostProbableAndWeighsThem) {
  for (const bool normalise : {false, true}) {
    for (const auto& [experts, k] : {std::pair{1, 1}, {6, 3}, {8, 2}, {20, 20}, {128, 8}}) {
      ExpertTable table(experts, k, normalise, 40, 1);
      const std::vector<Row> rows = random_rows(40, experts, 5);
      const std::vector<Chosen> chosen = choose(table, rows);
      EXPECT_EQ(table.slots(), 40 * k);
      for (size_t t = 0; t < rows.size(); ++t) {
        Row odds = rows[t];
        reference_softmax(odds.data(), experts);
        Row sorted = odds;
        std::sort(sorted.rbegin(), sorted.rend());
        double kept = 0;
        for (int i = 0; i < k; ++i) kept += sorted[size_t(i)];
        ASSERT_EQ(chosen[t].size(), size_t(k));
        for (const auto& [expert, weight] : chosen[t]) {
          const float odd = odds[size_t(expert)];
          EXPECT_GE(odd, sorted[size_t(k) - 1]);
          EXPECT_NEAR(weight, normalise ? odd / kept : odd, 1e-6);
        }
      }
    }
  }
}

TEST(ExpertTable, TiesGoToTheLowerNumber) {
  ExpertTable table(5, 3, true, 2, 1);
  const auto chosen = choose(table, {{1, 2, 1, 1, 1}, {0, 0, 0, 0, 0}});
  const auto experts = [](const Chosen& list) {
    std::vector<int> numbers;
    for (const auto& [expert, weight] : list) numbers.push_back(expert);
    return numbers;
  };
  EXPECT_THAT(experts(chosen[0]), ::testing::ElementsAre(0, 1, 2));
  EXPECT_THAT(experts(chosen[1]), ::testing::ElementsAre(0, 1, 2));
  EXPECT_NEAR(chosen[1][0].second, 1.0 / 3, 1e-7);
}

TEST(ExpertTable, AChoiceDoesNotDependOnOtherTokens) {
  const std::vector<Row> rows = random_rows(30, 16, 7);
  ExpertTable all(16, 4, true, 30, 2), one(16, 4, true, 1, 1);
  const std::vector<Chosen> together = choose(all, rows);
  for (size_t t = 0; t < rows.size(); ++t) EXPECT_EQ(choose(one, {rows[t]})[0], together[t]);
  // A smaller step after a larger one has nothing of it.
  EXPECT_EQ(choose(all, {rows[3]})[0], together[3]);
  EXPECT_EQ(all.slots(), 4);
}

TEST(ExpertTable, BrokenLogitsStillChooseDifferentExperts) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  ExpertTable table(6, 4, true, 3, 1);
  const auto chosen = choose(table, {{kNan, 1, kNan, 2, -kNan, 0},
                                     {kInfinity, -kInfinity, 0, kInfinity, 1, 2},
                                     Row(6, -kInfinity)});
  for (const Chosen& list : chosen) {
    ASSERT_EQ(list.size(), 4u);
    for (size_t i = 0; i < list.size(); ++i) {
      EXPECT_TRUE(list[i].first >= 0 && list[i].first < 6);
      EXPECT_TRUE(i == 0 || list[i].first > list[i - 1].first);
    }
  }
}

}  // namespace
}  // namespace baton::engine
