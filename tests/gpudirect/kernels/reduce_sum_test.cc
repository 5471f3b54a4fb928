// Sums of vectors, to the bit as collectives' own.
#include "collectives/reduce/reduce.h"
#include "gpudirect/kernels/arithmetic-inl.h"
#include "tests/gpudirect/kernels/emulated_memory.h"
#include "tests/test.h"

namespace baton::gpudirect::kernels {
namespace {

constexpr std::array kOperations = {ReduceOp::kSum, ReduceOp::kProd, ReduceOp::kMin,
                                    ReduceOp::kMax};

template <class T>
bool is_nan(T value) {
  return value != value;
}

// Any bits, so denormals, infinities and NaN too: that one is left is a promise, its payload is
// nobody's. `widen` makes a number of a word.
template <class Word, class Widen>
void compare(SumElement element, DataType type, const Widen& widen) {
  for (uint64_t seed = 0; seed < 28; ++seed) {
    SCOPED_TRACE(testing::Message() << name_of(type) << ", seed " << seed);
    std::mt19937_64 random(seed);
    // Sometimes all begin at 16 bytes, sometimes at an element.
    const bool many = seed >= 24;  // for one block, whose threads then have several vectors at once
    const size_t skip = seed % 2 == 0 || many ? 0 : 1 + seed % 5;
    const size_t count = many ? 20003 : 1 + seed * 97;
    const auto source_count = static_cast<uint32_t>(1 + seed % (many ? 4 : kMaxSources));
    const size_t operation = many ? 0 : seed / 2 % kOperations.size();
    const ReduceOp op = kOperations[operation];
    ReduceSum arguments{.count = count,
                        .source_count = source_count,
                        .divide_by = op == ReduceOp::kSum && seed % 3 == 0 ? source_count : 1,
                        .element = element,
                        .operation = static_cast<SumOperation>(operation)};
    std::vector<std::vector<Word>> sources(source_count, std::vector<Word>(skip + count));
    std::vector<const void*> pointers;
    EmulatedMemory memory;
    for (uint32_t s = 0; s < source_count; ++s) {
      for (Word& word : sources[s]) word = static_cast<Word>(random());
      // Of the same magnitude now and then, so that minima of equals and zeros are made.
      for (size_t i = s; s > 0 && i < count; i += 7) {
        sources[s][skip + i] =
            static_cast<Word>(sources[0][skip + i] ^ (Word{1} << (sizeof(Word) * 8 - 1)));
      }
      pointers.push_back(sources[s].data() + skip);
      arguments.sources[s] = pointers.back();
      memory.allow(sources[s]);
    }
    std::vector<Word> ours(skip + count), theirs(skip + count);
    memory.allow(ours, true);
    arguments.target = ours.data() + skip;
    EXPECT_EQ(run_kernel("baton_reduce_sum", arguments, many ? 1 : 3, memory, seed), std::nullopt);
    collectives::reduce::fold(type, op, theirs.data() + skip, pointers, count, arguments.divide_by);
    for (size_t i = 0; i < ours.size(); ++i) {
      if (is_nan(widen(theirs[i])) && is_nan(widen(ours[i]))) continue;
      ASSERT_EQ(ours[i], theirs[i]) << "element " << i;
    }
  }
}

TEST(ReduceSum, IsWhatCollectivesCombine) {
  const auto whole = [](auto word) { return word; };
  compare<uint32_t>(SumElement::kF32, DataType::kF32, [](uint32_t w) { return float_of(w); });
  compare<uint16_t>(SumElement::kF16, DataType::kF16, [](uint16_t w) { return from_f16(w); });
  compare<uint16_t>(SumElement::kBF16, DataType::kBF16, [](uint16_t w) { return from_bf16(w); });
  compare<uint64_t>(SumElement::kF64, DataType::kF64,
                    [](uint64_t w) { return std::bit_cast<double>(w); });
  compare<uint8_t>(SumElement::kI8, DataType::kI8, whole);
  compare<uint8_t>(SumElement::kU8, DataType::kU8, whole);
  compare<uint32_t>(SumElement::kI32, DataType::kI32, whole);
  compare<uint64_t>(SumElement::kI64, DataType::kI64, whole);
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
