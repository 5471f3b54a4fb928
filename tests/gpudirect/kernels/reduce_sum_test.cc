// Sums of vectors, to the bit as collectives' own.
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "collectives/reduce/reduce.h"
#include "gpudirect/kernels/arithmetic-inl.h"
#include "tests/gpudirect/kernels/emulated_memory.h"

namespace baton::gpudirect::kernels {
namespace {

// Any bits, so denormals and infinities too; no NaN, whose payload is nobody's promise.
template <class Word>
std::vector<Word> numbers(size_t count, uint32_t exponent_bits, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<Word> out(count);
  const auto infinity = static_cast<Word>(exponent_bits);
  for (Word& word : out) {
    word = static_cast<Word>(random());
    if ((word & infinity) == infinity) word &= static_cast<Word>(~exponent_bits >> 1);
  }
  return out;
}

template <class Word>
void compare(Element element, DataType type, uint32_t exponent_bits) {
  for (uint64_t seed = 0; seed < 24; ++seed) {
    SCOPED_TRACE(seed);
    const size_t count = 1 + seed * 97;
    const auto source_count = static_cast<uint32_t>(1 + seed % kMaxSources);
    const uint32_t divide_by = seed % 3 == 0 ? source_count : 1;
    std::vector<std::vector<Word>> sources;
    std::vector<const void*> pointers;
    ReduceSum arguments{
        .count = count, .source_count = source_count, .divide_by = divide_by, .element = element};
    EmulatedMemory memory;
    for (uint32_t s = 0; s < source_count; ++s) {
      sources.push_back(numbers<Word>(count, exponent_bits, seed * 16 + s));
    }
    for (uint32_t s = 0; s < source_count; ++s) {
      pointers.push_back(sources[s].data());
      arguments.sources[s] = sources[s].data();
      memory.allow(sources[s]);
    }
    std::vector<Word> ours(count), theirs(count);
    memory.allow(ours, true);
    arguments.target = ours.data();
    EXPECT_EQ(run_kernel("baton_reduce_sum", arguments, 3, memory, seed), std::nullopt);
    collectives::reduce::fold(type, ReduceOp::kSum, theirs.data(), pointers, count, divide_by);
    for (size_t i = 0; i < count; ++i) {
      const auto magnitude = static_cast<Word>(theirs[i] & static_cast<Word>(~Word{0}) >> 1);
      if (magnitude > exponent_bits) continue;  // infinity less infinity
      ASSERT_EQ(ours[i], theirs[i]) << "element " << i;
    }
  }
}

TEST(ReduceSum, IsWhatCollectivesAdd) {
  compare<uint32_t>(Element::kF32, DataType::kF32, 0x7f800000u);
  compare<uint16_t>(Element::kBF16, DataType::kBF16, 0x7f80u);
  compare<uint16_t>(Element::kF16, DataType::kF16, 0x7c00u);
}

TEST(ReduceSum, InPlace) {
  std::vector<float> a(1000, 1.5f), b(1000, 0.25f);
  EmulatedMemory memory;
  memory.allow(a, true);
  memory.allow(b);
  ReduceSum arguments{.target = a.data(), .count = a.size(), .source_count = 2};
  arguments.sources[0] = a.data();
  arguments.sources[1] = b.data();
  EXPECT_EQ(run_kernel("baton_reduce_sum", arguments, 2, memory), std::nullopt);
  EXPECT_EQ(a, std::vector<float>(1000, 1.75f));
}

// All of them: each half to fp32 and back, as collectives' sum of one vector does it.
TEST(Arithmetic, EveryHalfSurvives) {
  for (uint32_t half = 0; half < 0x10000; ++half) {
    if ((half & 0x7f80u) != 0x7f80u) {
      ASSERT_EQ(to_bf16(from_bf16(half)), half);
    }
    if ((half & 0x7c00u) != 0x7c00u || (half & 0x3ffu) == 0) {
      ASSERT_EQ(to_f16(from_f16(half)), half);
    }
  }
  EXPECT_TRUE(std::isnan(from_f16(0x7e00)) && std::isnan(from_f16(to_f16(from_f16(0xfe01)))));
  EXPECT_TRUE(std::isnan(from_bf16(to_bf16(float_of(0x7f800001)))));
}

}  // namespace
}  // namespace baton::gpudirect::kernels
