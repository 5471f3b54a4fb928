// Weighted sums and 8-bit rows, beside plain loops.
#include "collectives/reduce/reduce.h"

#include <cmath>

#include "tests/test.h"

namespace baton::collectives::reduce {
namespace {

std::vector<float> random_row(std::mt19937_64& random, size_t count, float scale = 1) {
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> row(count);
  for (float& x : row) x = normal(random);
  return row;
}

TEST(Weighted, SumsAreFusedInOrder) {
  std::mt19937_64 random(1);
  for (size_t count : {1, 3, 15, 16, 17, 63, 64, 65, 130, 1000}) {
    for (size_t rows : {0, 1, 2, 5, 9}) {
      std::vector<std::vector<float>> data;
      std::vector<const void*> from;
      for (size_t r = 0; r < rows; ++r) data.push_back(random_row(random, count));
      for (const auto& row : data) from.push_back(row.data());
      const std::vector<float> weights = random_row(random, rows);
      std::vector<float> out(count + 1, 77), fused(count), apart(count);
      weighted_sum(DataType::kF32, out.data(), from, weights, count);
      EXPECT_EQ(out[count], 77) << "written behind the end";
      out.pop_back();
      for (size_t i = 0; i < count && rows > 0; ++i) {
        fused[i] = apart[i] = data[0][i] * weights[0];
        for (size_t r = 1; r < rows; ++r) {
          fused[i] = std::fma(data[r][i], weights[r], fused[i]);
          const volatile float product = data[r][i] * weights[r];
          apart[i] += product;
        }
      }
      EXPECT_TRUE(out == fused || out == apart) << count << " elements of " << rows << " rows";
    }
  }
}

TEST(Weighted, SmallFloatsAreRoundedOnce) {
  // 1 + 2^-8 + 2^-8 is a bf16 number, which a sum that is rounded after each step does not reach.
  const uint16_t one = 0x3f80, small = 0x3b80;
  const std::vector<const void*> rows = {&one, &small, &small};
  uint16_t out = 0;
  weighted_sum(DataType::kBF16, &out, rows, std::vector<float>{1, 1, 1}, 1);
  EXPECT_EQ(out, 0x3f81);
}

TEST(Weighted, RowsSurviveEightBitsWithinHalfAStep) {
  std::mt19937_64 random(2);
  for (size_t count : {1, 100, 128, 129, 300, 7168}) {
    const std::vector<float> row = random_row(random, count, 1e-3f + static_cast<float>(count));
    std::vector<uint8_t> small(count);
    std::vector<float> scales(scales_of(count)), back(count);
    to_e4m3(DataType::kF32, row.data(), count, small.data(), scales.data());
    from_e4m3(small.data(), scales.data(), count, back.data());
    for (size_t i = 0; i < count; ++i) {
      float most = 0;
      for (size_t e = i / 128 * 128; e < std::min(count, i / 128 * 128 + 128); ++e) {
        most = std::max(most, std::fabs(row[e]));
      }
      EXPECT_EQ(scales[i / 128], most / 448);
      // Three bits behind the first one; below 2^-6 steps are of 2^-9.
      const float step = std::max(std::fabs(row[i]) / 16, scales[i / 128] * 0x1p-10f);
      ASSERT_LE(std::fabs(row[i] - back[i]), step * 1.0001f) << "element " << i;
    }
  }
}

TEST(Weighted, OddBlocksStayApart) {
  std::vector<float> row(128 * 4, 1);
  std::fill_n(row.begin(), 128, 0.0f);
  row[130] = std::numeric_limits<float>::infinity();
  row[300] = std::numeric_limits<float>::quiet_NaN();
  std::vector<uint8_t> small(row.size());
  std::vector<float> scales(4), back(row.size());
  to_e4m3(DataType::kF32, row.data(), row.size(), small.data(), scales.data());
  from_e4m3(small.data(), scales.data(), row.size(), back.data());
  EXPECT_EQ(back[5], 0);
  EXPECT_TRUE(std::isnan(back[129]) && std::isnan(back[131]) && std::isnan(back[257]));
  EXPECT_EQ(back[400], 1);
}

}  // namespace
}  // namespace baton::collectives::reduce
