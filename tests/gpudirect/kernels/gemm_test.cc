// Matrix products: the engine's bits, for every shape, whatever else is in the batch.
#include "tests/engine_model/reference_kernels.h"
#include "tests/gpudirect/kernels/emulated_memory.h"
#include "tests/test.h"

namespace baton::gpudirect::kernels {
namespace {

struct Shape {
  uint32_t m, n, k;
};
// Whole tiles, edges of all three, few rows and many, one step of k and several.
constexpr Shape kShapes[] = {{1, 64, 32},  {1, 24, 8},    {3, 100, 72}, {16, 64, 64}, {17, 130, 40},
                             {64, 64, 96}, {70, 48, 104}, {129, 8, 32}, {5, 272, 32}, {2, 24, 712}};

struct Product {
  Product(const Shape& of, uint64_t seed)
      : shape(of),
        lda(of.k + 8),
        ldc(of.n + 3),
        a(normal(size_t{of.m} * lda, seed)),
        bias(normal(of.n, seed + 1)),
        c(normal(size_t{of.m} * ldc, seed + 2)) {
    for (const float value : normal(size_t{of.n} * of.k, seed + 3)) {
      w.push_back(engine::bf16_from_float(value));
    }
  }
  // What the kernels for so many rows make of it, over so many blocks.
  std::vector<float> run(bool bf16, bool accumulate, bool biased, uint32_t blocks) {
    return shape.m <= kFewRows
               ? run_by(bf16 ? "baton_gemm_bf16_few" : "baton_gemm_few", accumulate, biased, blocks)
               : run_by(bf16 ? "baton_gemm_bf16" : "baton_gemm", accumulate, biased, blocks);
  }
  std::vector<float> run_by(const char* kernel, bool accumulate, bool biased, uint32_t blocks) {
    std::vector<float> out = c;
    std::vector<uint16_t> rounded;
    for (uint32_t i = 0; i < shape.m * shape.k; ++i) {
      rounded.push_back(engine::bf16_from_float(a[i / shape.k * lda + i % shape.k]));
    }
    EmulatedMemory memory;
    const Gemm arguments{.a = memory.read(a),
                         .w = memory.read(w),
                         .bias = biased ? memory.read(bias) : nullptr,
                         .c = memory.write(out),
                         .m = shape.m,
                         .n = shape.n,
                         .k = shape.k,
                         .lda = lda,
                         .ldc = ldc,
                         .accumulate = accumulate ? 1u : 0u,
                         .rounded = memory.read(rounded)};
    EXPECT_EQ(run_kernel(kernel, arguments, blocks, memory, blocks), std::nullopt);
    return out;
  }
  // The engine's plain loops.
  std::vector<float> plain(bool bf16, bool accumulate, bool biased) const {
    std::vector<float> out = c, wide;
    const auto m = static_cast<int>(shape.m), n = static_cast<int>(shape.n);
    const auto k = static_cast<int>(shape.k);
    if (bf16) {
      engine::reference_gemm_bf16(m, n, k, a.data(), lda, w.data(), out.data(), ldc, accumulate);
    } else {
      for (const uint16_t half : w) wide.push_back(engine::float_from_bf16(half));
      engine::reference_gemm(m, n, k, {a.data(), lda, 1}, {wide.data(), 1, size_t{shape.k}},
                             out.data(), ldc, accumulate);
    }
    for (uint32_t i = 0; biased && i < shape.m * shape.n; ++i) {
      out[i / shape.n * ldc + i % shape.n] += bias[i % shape.n];
    }
    return out;
  }

  Shape shape;
  uint32_t lda, ldc;
  std::vector<float> a, bias, c;
  std::vector<uint16_t> w;
};

void expect_plain(bool bf16) {
  for (const Shape& shape : kShapes) {
    Product product(shape, shape.m + shape.n);
    for (const bool accumulate : {false, true}) {
      const bool biased = accumulate == (shape.m % 2 == 0);
      const std::vector<float> ours = product.run(bf16, accumulate, biased, 3);
      const std::vector<float> wanted = product.plain(bf16, accumulate, biased);
      for (size_t i = 0; i < ours.size(); ++i) {
        ASSERT_EQ(ours[i], wanted[i])
            << shape.m << " x " << shape.n << " x " << shape.k << " at " << i;
      }
    }
  }
}

TEST(Gemm, IsTheEngines) { expect_plain(false); }

TEST(GemmBf16, IsTheEnginesWhereTheEmulationAdds) { expect_plain(true); }

// Of both orders in which the emulation can add.
TEST(GemmBf16, IsWithinTheBoundHoweverTensorCoresAdd) {
  Product product({4, 32, 512}, 7);
  const std::vector<float> as_engine = product.run(true, false, false, 1);
  use_tensor_core_sums(true);
  const std::vector<float> ours = product.run(true, false, false, 1);
  use_tensor_core_sums(false);
  EXPECT_NE(ours, as_engine);
  for (uint32_t row = 0; row < 4; ++row) {
    for (uint32_t column = 0; column < 32; ++column) {
      double exact = 0, largest = 0;
      for (uint32_t k = 0; k < 512; ++k) {
        const float left =
            engine::float_from_bf16(engine::bf16_from_float(product.a[row * product.lda + k]));
        const float right = engine::float_from_bf16(product.w[column * 512 + k]);
        exact += double{left} * right;
        largest = std::max({largest, std::fabs(exact), std::fabs(double{left} * right)});
      }
      const size_t at = row * product.ldc + column;
      EXPECT_NEAR(ours[at], exact, 32 * largest * 0x1p-19);
      EXPECT_NEAR(as_engine[at], exact, 32 * largest * 0x1p-19);
    }
  }
}

// In whatever order tensor cores add, and whichever kernel multiplies so many rows.
TEST(Gemm, ARowHasTheSameBitsInEveryBatch) {
  use_tensor_core_sums(true);
  for (const bool bf16 : {false, true}) {
    Product all({80, 72, 200}, 3);
    const std::vector<float> together = all.run(bf16, false, true, 2);
    for (const uint32_t m : {1u, 4u, 5u, 16u, 17u, 64u, 65u}) {
      all.shape.m = m;
      const std::vector<float> few = all.run(bf16, false, true, m);
      EXPECT_TRUE(std::equal(few.begin(),
                             few.begin() + static_cast<ptrdiff_t>((m - 1) * all.ldc + 72),
                             together.begin()))
          << bf16 << " " << m;
    }
  }
  use_tensor_core_sums(false);
}

// Large enough that tiles are large: the last row, alone and among all.
TEST(Gemm, LargeTilesHaveTheBitsOfSmallOnes) {
  const Shape shape{600, 4900, 40};
  static_assert(large_tiles(600, 4900) && large_bf16_tiles(600, 4900));
  for (const bool bf16 : {false, true}) {
    Product all(shape, 5);
    const std::vector<float> together = all.run(bf16, true, true, 7);
    Product last = all;
    last.shape.m = 1;
    last.a.erase(last.a.begin(), last.a.end() - last.lda);
    last.c.erase(last.c.begin(), last.c.end() - last.ldc);
    EXPECT_TRUE(std::equal(together.end() - all.ldc, together.end() - 3,
                           last.run(bf16, true, true, 3).begin()));
  }
}

}  // namespace
}  // namespace baton::gpudirect::kernels
