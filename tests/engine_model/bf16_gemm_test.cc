// Products in bf16: every unit computes the chains that the reference writes out.
#include "engine/kernels/bf16_gemm.h"

#include "engine/kernels/amx.h"
#include "engine/kernels/bf16_dot.h"
#include "engine/kernels/elementwise.h"
#include "tests/engine_model/reference_kernels.h"
#include "tests/engine_model/same_bits.h"
#include "tests/engine_model/vector_widths.h"
#include "tests/test.h"

namespace baton::engine {
namespace {

// Numbers between 2^low and 2^high of either sign.
std::vector<float> numbers(size_t count, int low, int high, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> values(count);
  for (float& value : values) {
    const uint32_t exponent = uint32_t(127 + low) + random() % uint32_t(high - low);
    value = std::bit_cast<float>(uint32_t(random() & 0x807fffffu) | exponent << 23);
  }
  return values;
}

std::vector<uint16_t> rounded(const std::vector<float>& values) {
  std::vector<uint16_t> bits;
  for (const float value : values) bits.push_back(bf16_from_float(value));
  return bits;
}

struct Product {
  Product(int rows, int columns, int depth, int low = -8, int high = 4)
      : m(rows),
        n(columns),
        k(depth),
        a(numbers(size_t(m) * k, low, high, 1)),
        weight(rounded(numbers(size_t(n) * k, low, high, 2))),
        packed(tiled_elements(k, n)) {
    pack_tiles(k, n, weight.data(), packed.data());
  }
  TiledB b() const { return {k, n, packed.data()}; }
  int m, n, k;
  std::vector<float> a;
  std::vector<uint16_t> weight;
  AlignedArray<uint16_t> packed;
};

std::string_view why_not(Bf16Unit unit) {
  if (unit == Bf16Unit::kTiles) return why_no_amx();
  return unit == Bf16Unit::kDots ? why_no_dots() : "";
}

class Bf16Gemm : public ::testing::TestWithParam<Bf16Unit> {
 protected:
  void SetUp() override {
    if (!usable(GetParam())) GTEST_SKIP() << why_not(GetParam());
  }
  // C starts as `start`, whose rows are `ldc` long.
  std::vector<float> multiply(const Product& p, int threads, std::vector<float> start, size_t ldc,
                              bool accumulate) const {
    ComputePool pool(threads);
    Bf16Scratch scratch(GetParam(), p.m, p.k, threads);
    gemm_bf16(pool, scratch, p.m, p.a.data(), size_t(p.k), p.b(), start.data(), ldc, accumulate);
    return start;
  }
  static std::vector<float> expected(const Product& p, std::vector<float> start, size_t ldc,
                                     bool accumulate) {
    reference_gemm_bf16(p.m, p.n, p.k, p.a.data(), size_t(p.k), p.weight.data(), start.data(), ldc,
                        accumulate);
    return start;
  }
};

// Promise(engine): bf16 products have the same bits by AMX, `vdpbf16ps` and plain vectors | the
//   sums of AMX's tiles are the definition
TEST_P(Bf16Gemm, EveryTailGivesTheReferenceChains) {
  // Around every edge: of a strip, two and three of them, a tile of columns and a panel, a step of
  // k, the steps at once, those between which sums are put away, and the rows of a task.
  for (const auto& [m, n, k] :
       {std::tuple{1, 1, 1}, {1, 272, 32},   {1, 130, 400},  {2, 33, 17},    {5, 64, 96},
        {6, 31, 33},         {7, 48, 64},    {15, 15, 3},    {16, 16, 31},   {17, 17, 65},
        {31, 65, 577},       {32, 32, 576},  {33, 95, 608},  {47, 96, 1153}, {120, 100, 64},
        {481, 40, 50},       {12, 70, 320},  {13, 33, 1500}, {500, 129, 40}, {577, 40, 50},
        {600, 70, 700},      {49, 40, 2100}, {67, 33, 4200}}) {
    const Product p(m, n, k);
    const size_t ldc = size_t(n) + 5;
    std::vector<float> start = numbers(size_t(m) * ldc, -3, 3, 3);
    for (const bool accumulate : {false, true}) {
      const auto want = expected(p, start, ldc, accumulate);
      for_every_width([&, m = m, n = n, k = k] {
        for (const int threads : {1, 3}) {
          // What lies between the rows of C stays as it was.
          EXPECT_TRUE(same_bits(multiply(p, threads, start, ldc, accumulate), want))
              << m << " x " << n << " x " << k << ", " << threads << " threads, accumulate "
              << accumulate;
        }
      });
    }
  }
}

TEST_P(Bf16Gemm, TinyNumbersAreZeroAndSpecialOnesStay) {
  // Products and sums that pass below the smallest normal number, in and out of C.
  const Product tiny(40, 40, 70, -75, -55);
  const std::vector<float> start = numbers(size_t{40} * 40, -127, -120, 3);
  for_every_width([&] {
    for (const bool add : {true, false}) {
      EXPECT_TRUE(same_bits(multiply(tiny, 2, start, 40, add), expected(tiny, start, 40, add)));
    }
  });

  Product special(20, 20, 40);
  const float infinity = std::numeric_limits<float>::infinity();
  for (size_t i = 0; i < 40; ++i) {
    special.a[i] = infinity;  // times numbers of both signs: NaN
    special.a[40 + i] = i == 7 ? infinity : 0.0f;
    special.a[80 + i] = -0.0f;
  }
  special.a[3 * 40] = std::numeric_limits<float>::quiet_NaN();
  special.a[4 * 40] = std::numeric_limits<float>::max();  // rounds to infinity
  const std::vector<float> zeros(400);
  const auto want = expected(special, zeros, 20, false);
  for_every_width([&] {
    const auto got = multiply(special, 1, zeros, 20, false);
    for (size_t i = 0; i < got.size(); ++i) {
      if (std::isnan(want[i])) {
        EXPECT_TRUE(std::isnan(got[i])) << i;
      } else {
        EXPECT_EQ(std::bit_cast<uint32_t>(got[i]), std::bit_cast<uint32_t>(want[i])) << i;
      }
    }
    EXPECT_TRUE(std::isnan(got[0]) && std::isinf(got[20]) && std::isnan(got[60]) &&
                std::isinf(got[80]));
  });
}

class Bf16FeedForward : public ::testing::TestWithParam<Bf16Unit> {};

TEST_P(Bf16FeedForward, GivesTheBitsOfItsProductsOneAfterTheOther) {
  if (!usable(GetParam())) GTEST_SKIP() << why_not(GetParam());
  // Around a block of rows and of columns, a strip, a step of k, and what one task takes.
  for (const auto& [m, k, hidden] : {std::tuple{1, 40, 32},
                                     {16, 64, 64},
                                     {33, 96, 96},
                                     {64, 33, 128},
                                     {65, 100, 352},
                                     {130, 576, 1056},
                                     {482, 70, 160}}) {
    const Product in(m, 2 * hidden, k), out(m, k, hidden);
    const size_t width = size_t(2 * hidden), ldc = size_t(k) + 3;
    const std::vector<float> start = numbers(size_t(m) * ldc, -3, 3, 5);
    for (const int threads : {1, 3}) {
      ComputePool pool(threads);
      Bf16Scratch scratch(GetParam(), m, std::max(k, hidden), threads, hidden + 64);
      ASSERT_TRUE(scratch.takes_hidden(hidden));
      EXPECT_FALSE(scratch.takes_hidden(hidden - 1));
      EXPECT_FALSE(scratch.takes_hidden(hidden + 96));
      std::vector<float> between(size_t(m) * width), want = start;
      gemm_bf16(pool, scratch, m, in.a.data(), size_t(k), in.b(), between.data(), width, false);
      for (size_t row = 0; row < size_t(m); ++row) {
        float* gate = between.data() + row * width;
        swiglu(gate, gate + hidden, gate, hidden);
      }
      gemm_bf16(pool, scratch, m, between.data(), width, out.b(), want.data(), ldc, true);
      const int rows = m, columns = k, middle = hidden;
      for_every_width([&] {
        std::vector<float> got = start;
        feed_forward_bf16(pool, scratch, rows, in.a.data(), size_t(columns), in.b(), out.b(),
                          got.data(), ldc);
        EXPECT_TRUE(same_bits(got, want))
            << rows << " x " << columns << " x " << middle << ", " << threads << " threads";
      });
    }
  }
}

TEST_P(Bf16Gemm, AThreadThatWasThereBeforeMayMultiplyToo) {
  // The kernel's permission is the process's: no thread need be younger than it.
  const Product p(33, 40, 64);
  const std::vector<float> zeros(size_t{33} * 40);
  const auto want = expected(p, zeros, 40, false);
  for_every_width([&] {
    std::vector<float> got;
    std::thread([&] { got = multiply(p, 2, zeros, 40, false); }).join();
    EXPECT_TRUE(same_bits(got, want));
  });
}

TEST_P(Bf16Gemm, RoundingControlsOfTheCallerAreLeftAsTheyWere) {
  const volatile float tiny = std::numeric_limits<float>::min();
  const Product p(9, 40, 64);
  multiply(p, 1, std::vector<float>(360), 40, false);
  EXPECT_GT(tiny / 2, 0.0f);
}

const auto kNameOfUnit = [](const auto& test) {
  if (test.param == Bf16Unit::kVectors) return "Vectors";
  return test.param == Bf16Unit::kTiles ? "Tiles" : "Dots";
};
INSTANTIATE_TEST_SUITE_P(Units, Bf16Gemm,
                         ::testing::Values(Bf16Unit::kVectors, Bf16Unit::kTiles, Bf16Unit::kDots),
                         kNameOfUnit);
INSTANTIATE_TEST_SUITE_P(Units, Bf16FeedForward,
                         ::testing::Values(Bf16Unit::kTiles, Bf16Unit::kDots), kNameOfUnit);

// --- whether vdpbf16ps may be used ---------------------------------------------------------------

// What processors could make of 16 pairs. `fn(upper a, upper b, lower a, lower b, sum)`.
template <auto fn>
void dots_by(const uint16_t* a, const uint16_t* b, float* sums) {
  for (int i = 0; i < 16; ++i) {
    sums[i] = fn(float_from_bf16(a[2 * i + 1]), float_from_bf16(b[2 * i + 1]),
                 float_from_bf16(a[2 * i]), float_from_bf16(b[2 * i]), sums[i]);
  }
}
float flushed(float x) {
  return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x;
}
float fused(float a, float b, float c) {
  return flushed(std::fma(flushed(a), flushed(b), flushed(c)));
}

TEST(Bf16Dots, AreBelievedOnlyWhereTheyAddInTheOrderOfTheChains) {
  EXPECT_TRUE(adds_in_order(dots_by<[](float a, float b, float c, float d, float sum) {
    return fused(c, d, fused(a, b, sum));
  }>));
  // The lower halves first.
  EXPECT_FALSE(adds_in_order(dots_by<[](float a, float b, float c, float d, float sum) {
    return fused(a, b, fused(c, d, sum));
  }>));
  // One rounding for both products.
  EXPECT_FALSE(adds_in_order(dots_by<[](float a, float b, float c, float d, float sum) {
    const double products = double{flushed(a)} * flushed(b) + double{flushed(c)} * flushed(d);
    return flushed(static_cast<float>(products + flushed(sum)));
  }>));
  // The two products are added first.
  EXPECT_FALSE(adds_in_order(dots_by<[](float a, float b, float c, float d, float sum) {
    return flushed(flushed(sum) + fused(c, d, flushed(flushed(a) * flushed(b))));
  }>));
  // A product is rounded before it is added; of bf16 none is, unless it is tiny.
  EXPECT_FALSE(adds_in_order(dots_by<[](float a, float b, float c, float d, float sum) {
    const float first = flushed(flushed(sum) + flushed(flushed(a) * flushed(b)));
    return flushed(first + flushed(flushed(c) * flushed(d)));
  }>));
  // Tiny numbers stay: on their way in, between the products, on their way out.
  EXPECT_FALSE(adds_in_order(dots_by<[](float a, float b, float c, float d, float sum) {
    return flushed(
        std::fma(flushed(c), flushed(d), flushed(std::fma(a, flushed(b), flushed(sum)))));
  }>));
  EXPECT_FALSE(adds_in_order(dots_by<[](float a, float b, float c, float d, float sum) {
    return flushed(
        std::fma(flushed(c), flushed(d), flushed(std::fma(flushed(a), flushed(b), sum))));
  }>));
  EXPECT_FALSE(adds_in_order(dots_by<[](float a, float b, float c, float d, float sum) {
    return flushed(
        std::fma(flushed(c), flushed(d), std::fma(flushed(a), flushed(b), flushed(sum))));
  }>));
  EXPECT_FALSE(adds_in_order(dots_by<[](float a, float b, float c, float d, float sum) {
    return std::fma(flushed(c), flushed(d), fused(a, b, sum));
  }>));
}

// --- who multiplies ------------------------------------------------------------------------------

TEST(Bf16Units, TilesAreBestThenDotsThenVectorsAndEachSaysWhyItCannotBeUsed) {
  EXPECT_TRUE(usable(Bf16Unit::kVectors));
  EXPECT_EQ(usable(Bf16Unit::kDots), dots_usable());
  EXPECT_EQ(dots_usable(), why_no_dots().empty());
  EXPECT_EQ(amx_usable(), why_no_amx().empty());
  EXPECT_EQ(best_bf16_unit(), amx_usable()    ? Bf16Unit::kTiles
                              : dots_usable() ? Bf16Unit::kDots
                                              : Bf16Unit::kVectors);
}

}  // namespace
}  // namespace baton::engine
