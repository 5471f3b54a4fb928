// The vector loops against the plain ones: bit by bit, for every instruction set of this machine.

#include "collectives/reduce/instruction_sets.h"  // as reduce.cc does
#include "hwy/highway.h"
#include "tests/reduce/reference.h"
#include "tests/sanitized.h"
#include "tests/test.h"

namespace baton::collectives::reduce {
namespace {

std::vector<DataType> all_types() {
  std::vector<DataType> types;
  for (int i = 0; i < kDataTypes; ++i) types.push_back(static_cast<DataType>(i));
  return types;
}
const std::vector<DataType> kTypes = all_types();

std::vector<ReduceOp> ops_of(DataType type) {
  std::vector<ReduceOp> ops;
  for (int i = 0; i < kReduceOps; ++i) {
    if (combines(type, static_cast<ReduceOp>(i))) ops.push_back(static_cast<ReduceOp>(i));
  }
  return ops;
}

constexpr std::array kSmallFloats = {DataType::kF16, DataType::kBF16, DataType::kF8E4M3,
                                     DataType::kF8E5M2};

size_t bytes_of(DataType type) {
  constexpr std::array<size_t, kDataTypes> kBytes = {4, 2, 2, 8, 1, 1, 4, 8, 1, 1, 4, 8, 1};
  return kBytes[static_cast<size_t>(type)];
}

// Elements as bit patterns, which is how they are compared.
struct Vector {
  DataType type;
  std::vector<uint8_t> bytes;

  Vector(DataType t, size_t count) : type(t), bytes(count * bytes_of(t)) {}
  size_t count() const { return bytes.size() / bytes_of(type); }
  void* at(size_t i) { return bytes.data() + i * bytes_of(type); }
  const void* at(size_t i) const { return bytes.data() + i * bytes_of(type); }

  template <class T>
  T get(size_t i) const {
    T value;
    std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
    return value;
  }
  template <class T>
  void set(size_t i, T value) {
    std::memcpy(bytes.data() + i * sizeof(T), &value, sizeof(T));
  }

  // Which NaN comes out is nobody's business: all count as one.
  uint64_t comparable(size_t i) const {
    switch (type) {
      case DataType::kF32:
        return std::isnan(get<float>(i)) ? ~uint64_t{0} : get<uint32_t>(i);
      case DataType::kF64:
        return std::isnan(get<double>(i)) ? ~uint64_t{0} : get<uint64_t>(i);
      case DataType::kF16:
        return (get<uint16_t>(i) & 0x7FFF) > 0x7C00 ? ~uint64_t{0} : get<uint16_t>(i);
      case DataType::kBF16:
        return (get<uint16_t>(i) & 0x7FFF) > 0x7F80 ? ~uint64_t{0} : get<uint16_t>(i);
      case DataType::kF8E4M3:
        return (get<uint8_t>(i) & 0x7F) == 0x7F ? ~uint64_t{0} : get<uint8_t>(i);
      case DataType::kF8E5M2:
        return (get<uint8_t>(i) & 0x7F) > 0x7C ? ~uint64_t{0} : get<uint8_t>(i);
      default:
        break;
    }
    uint64_t bits = 0;
    std::memcpy(&bits, at(i), bytes_of(type));
    return bits;
  }
};

std::string difference(const Vector& got, const Vector& want) {
  for (size_t i = 0; i < want.count(); ++i) {
    if (got.comparable(i) == want.comparable(i)) continue;
    return absl::StrFormat("element %u of %u is %x, not %x", i, want.count(), got.comparable(i),
                           want.comparable(i));
  }
  return "";
}

// Values that go wrong first: NaN, infinities, both zeros, denormals, the extremes, ties.
void add_extremes(Vector& v, std::mt19937_64& random) {
  const auto spread = [&](auto values) {
    using T = typename decltype(values)::value_type;
    for (size_t i = 0; i < v.count(); ++i) {
      if (random() % 3 == 0) v.set<T>(i, values[random() % values.size()]);
    }
  };
  using F32 = std::numeric_limits<float>;
  using F64 = std::numeric_limits<double>;
  using I32 = std::numeric_limits<int32_t>;
  using I64 = std::numeric_limits<int64_t>;
  switch (v.type) {
    case DataType::kF32:
      return spread(std::vector<float>{F32::quiet_NaN(), F32::infinity(), -F32::infinity(), 0.0f,
                                       -0.0f, F32::denorm_min(), -F32::denorm_min(), F32::max(),
                                       F32::lowest(), F32::min(), 1.0f, -1.0f});
    case DataType::kF64:
      return spread(std::vector<double>{F64::quiet_NaN(), F64::infinity(), -F64::infinity(), 0.0,
                                        -0.0, F64::denorm_min(), F64::max(), F64::lowest(), 1.0});
    case DataType::kF16:  // NaN, infinities, zeros, denormals, largest, 1 and its neighbours
      return spread(std::vector<uint16_t>{0x7E00, 0xFE01, 0x7C00, 0xFC00, 0, 0x8000, 1, 0x8001,
                                          0x03FF, 0x0400, 0x7BFF, 0xFBFF, 0x3C00, 0x3C01, 0x1000});
    case DataType::kBF16:
      return spread(std::vector<uint16_t>{0x7FC0, 0xFFC1, 0x7F80, 0xFF80, 0, 0x8000, 1, 0x8001,
                                          0x007F, 0x0080, 0x7F7F, 0xFF7F, 0x3F80, 0x3F81, 0x3B80});
    case DataType::kF8E4M3:
      return spread(std::vector<uint8_t>{0x7F, 0xFF, 0x7E, 0xFE, 0, 0x80, 1, 0x81, 7, 8, 0x38});
    case DataType::kF8E5M2:
      return spread(
          std::vector<uint8_t>{0x7E, 0xFD, 0x7C, 0xFC, 0x7B, 0xFB, 0, 0x80, 1, 3, 4, 0x3C});
    case DataType::kBool:  // and any other byte
      return spread(std::vector<uint8_t>{0, 0, 0, 1, 2});
    case DataType::kI8:
    case DataType::kU8:
      return spread(std::vector<uint8_t>{0, 1, 0x7F, 0x80, 0x81, 0xFF});
    case DataType::kI32:
    case DataType::kU32:
      return spread(std::vector<int32_t>{0, 1, -1, I32::max(), I32::min(), I32::min() + 1});
    case DataType::kI64:
    case DataType::kU64:
      return spread(std::vector<int64_t>{0, 1, -1, I64::max(), I64::min(), I64::min() + 1});
  }
}

Vector values(DataType type, size_t count, uint64_t seed) {
  Vector v(type, count);
  std::mt19937_64 random(seed);
  for (uint8_t& byte : v.bytes) byte = static_cast<uint8_t>(random());
  if (type == DataType::kF32 || type == DataType::kF64) {
    // Random bits are mostly huge or tiny: take numbers that make sums round.
    std::normal_distribution<double> normal(0, 100);
    for (size_t i = 0; i < count; ++i) {
      if (type == DataType::kF32) v.set(i, static_cast<float>(normal(random)));
      if (type == DataType::kF64) v.set(i, normal(random));
    }
  }
  add_extremes(v, random);
  return v;
}

// One run per instruction set.
class ReduceTest : public testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override {
    hwy::SetSupportedTargetsForTest(GetParam());
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
  void TearDown() override {
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
};

INSTANTIATE_TEST_SUITE_P(Targets, ReduceTest,
                         testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& target) { return hwy::TargetName(target.param); });

TEST_P(ReduceTest, EveryTypeAndOperationIsBitIdenticalToThePlainLoop) {
  uint64_t seed = 1;
  std::vector<size_t> counts = {1, 2, 3, 7, 15, 17, 63, 64, 65, 127, 255, 1000, 4099};
  if (kSanitized) counts.resize(counts.size() - 2);
  for (const DataType type : kTypes) {
    for (const ReduceOp op : ops_of(type)) {
      for (const size_t count : counts) {
        for (const uint32_t by : {1u, 2u, 3u, 7u}) {
          const Vector a = values(type, count, ++seed), b = values(type, count, ++seed);
          Vector got(type, count), want(type, count);
          reduce(type, op, got.at(0), a.at(0), b.at(0), count, by);
          reference::reduce(type, op, want.at(0), a.at(0), b.at(0), count, by);
          ASSERT_EQ(difference(got, want), "")
              << "type " << int(type) << " op " << int(op) << " divided by " << by;
        }
      }
    }
  }
}

TEST_P(ReduceTest, FoldsAnyNumberOfSourcesInTheirOrder) {
  uint64_t seed = 1000;
  for (const DataType type : kTypes) {
    for (const ReduceOp op : ops_of(type)) {
      for (const size_t source_count : {1, 2, 3, 5, 9}) {
        const size_t count = 517;
        std::vector<Vector> sources;
        for (size_t s = 0; s < source_count; ++s) sources.push_back(values(type, count, ++seed));
        std::vector<const void*> pointers;
        for (const Vector& source : sources) pointers.push_back(source.at(0));
        Vector got(type, count), want(type, count);
        const uint32_t by = op == ReduceOp::kAvg ? uint32_t(source_count) : 1;
        fold(type, op, got.at(0), pointers, count, by);
        reference::fold(type, op, want.at(0), pointers, count, by);
        ASSERT_EQ(difference(got, want), "")
            << "type " << int(type) << " op " << int(op) << " of " << source_count;
        // The target may be any of the sources.
        fold(type, op, sources.back().at(0), pointers, count, by);
        ASSERT_EQ(difference(sources.back(), want), "");
      }
    }
  }
}

TEST_P(ReduceTest, InPlaceOnEitherSideAndAtAnyElement) {
  for (const DataType type : kTypes) {
    for (const size_t offset : {0, 1, 3, 5}) {
      const size_t count = 333;
      const Vector a = values(type, count + offset, 1), b = values(type, count + offset, 2);
      Vector want = a, left = a, right = b;
      reference::reduce(type, ReduceOp::kSum, want.at(offset), a.at(offset), b.at(offset), count);
      reduce(type, ReduceOp::kSum, left.at(offset), left.at(offset), b.at(offset), count);
      EXPECT_EQ(difference(left, want), "") << int(type);
      reduce(type, ReduceOp::kSum, right.at(offset), a.at(offset), right.at(offset), count);
      for (size_t i = 0; i < offset; ++i) EXPECT_EQ(right.comparable(i), b.comparable(i));
      std::memcpy(right.bytes.data(), want.bytes.data(), offset * bytes_of(type));
      EXPECT_EQ(difference(right, want), "") << int(type);
    }
  }
}

// Widening is shown by rounding back what no operation changed; all of it, since there is little.
TEST_P(ReduceTest, EverySmallFloatSurvivesItsWayThroughF32) {
  for (const DataType type : kSmallFloats) {
    const bool bytes = bytes_of(type) == 1;
    Vector all(type, bytes ? 1 << 8 : 1 << 16);
    for (size_t i = 0; i < all.count(); ++i) {
      bytes ? all.set(i, static_cast<uint8_t>(i)) : all.set(i, static_cast<uint16_t>(i));
    }
    Vector got(type, all.count());
    const std::array<const void*, 1> one = {all.at(0)};
    fold(type, ReduceOp::kSum, got.at(0), one, all.count());
    EXPECT_EQ(difference(got, all), "");
    const std::array<const void*, 2> twice = {all.at(0), all.at(0)};
    fold(type, ReduceOp::kMin, got.at(0), twice, all.count());
    EXPECT_EQ(difference(got, all), "");
    // Halves and products meet every tie and every denormal.
    for (const uint32_t by : {2u, 3u, 5u, 1024u, 3000u}) {
      Vector want = all;
      reference::fold(type, ReduceOp::kSum, want.at(0), one, all.count(), by);
      fold(type, ReduceOp::kSum, got.at(0), one, all.count(), by);
      EXPECT_EQ(difference(got, want), "") << by;
    }
  }
}

// All pairs there are, so every sum and product that can round or overflow.
TEST_P(ReduceTest, EveryPairOfEightBitFloatsIsAsThePlainLoopHasIt) {
  for (const DataType type : {DataType::kF8E4M3, DataType::kF8E5M2}) {
    for (const ReduceOp op : ops_of(type)) {
      for (const uint32_t by : {1u, 3u}) {
        Vector a(type, 1 << 16), b(type, 1 << 16), got(type, 1 << 16), want(type, 1 << 16);
        for (size_t i = 0; i < a.count(); ++i) {
          a.set(i, static_cast<uint8_t>(i));
          b.set(i, static_cast<uint8_t>(i >> 8));
        }
        reduce(type, op, got.at(0), a.at(0), b.at(0), a.count(), by);
        reference::reduce(type, op, want.at(0), a.at(0), b.at(0), a.count(), by);
        ASSERT_EQ(difference(got, want), "") << name_of(type) << " " << name_of(op);
      }
    }
  }
}

// OCP 8-bit floating point: no infinities, what is too large becomes 448, ties go to the even code.
TEST_P(ReduceTest, E4M3IsTheNearestValue) {
  std::array<float, 256> value;
  for (int code = 0; code < 256; ++code) {
    const int exponent = code >> 3 & 15, digits = code & 7;
    value[code] = (code & 0x80 ? -1 : 1) * std::ldexp(float(exponent == 0 ? digits : 8 + digits),
                                                      std::max(exponent, 1) - 10);
  }
  const auto is_nan = [](int code) { return (code & 0x7F) == 0x7F; };
  std::vector<uint8_t> a, b;
  for (int i = 0; i < 1 << 16; ++i) {
    a.push_back(static_cast<uint8_t>(i));
    b.push_back(static_cast<uint8_t>(i >> 8));
  }
  std::vector<uint8_t> got(a.size());
  reduce(DataType::kF8E4M3, ReduceOp::kSum, got.data(), a.data(), b.data(), a.size());
  for (size_t i = 0; i < got.size(); ++i) {
    const float sum = value[a[i]] + value[b[i]];
    const auto distance = [&](int code) { return std::fabs(value[code] - sum); };
    int want = std::signbit(sum) ? 0x80 : 0;
    for (int code = want + 1, last = want + 0x7E; code <= last; ++code) {
      const bool nearer = distance(code) < distance(want);
      if (nearer || (distance(code) == distance(want) && code % 2 == 0)) want = code;
    }
    const bool nan = is_nan(a[i]) || is_nan(b[i]);
    ASSERT_TRUE(nan ? is_nan(got[i]) : got[i] == want)
        << i << ": " << int(got[i]) << ", not " << want;
  }
}

// More elements than there are factors in a row.
TEST_P(ReduceTest, TimesAFactorIsTheProductWithAVectorOfIt) {
  for (const DataType type : kTypes) {
    if (!combines(type, ReduceOp::kPreMulSum)) continue;
    const size_t count = 5003;
    const Vector a = values(type, count, 11), factor = values(type, 1, 12);
    Vector factors(type, count), got(type, count), want(type, count);
    for (size_t i = 0; i < count; ++i) std::memcpy(factors.at(i), factor.at(0), bytes_of(type));
    reference::reduce(type, ReduceOp::kProd, want.at(0), a.at(0), factors.at(0), count);
    multiply(type, got.at(0), a.at(0), factor.at(0), count);
    EXPECT_EQ(difference(got, want), "") << name_of(type);
    got = a;
    multiply(type, got.at(0), got.at(0), factor.at(0), count);
    EXPECT_EQ(difference(got, want), "") << name_of(type) << ", in place";
  }
}

TEST_P(ReduceTest, SmallFloatsAreRoundedOnceAndToEven) {
  // 2048 + 1 lies between 2048 and 2050 in f16: to even gives 2048, but 2048 + (1 + 1) is 2050.
  const uint16_t big = 0x6800, one = 0x3C00;
  const std::array<const void*, 3> sources = {&big, &one, &one};
  uint16_t sum = 0;
  fold(DataType::kF16, ReduceOp::kSum, &sum, sources, 1);
  EXPECT_EQ(sum, 0x6801);  // 2050
  reduce(DataType::kF16, ReduceOp::kSum, &sum, &big, &one, 1);
  EXPECT_EQ(sum, 0x6800);
  const uint16_t largest = 0x7BFF;  // 65504: twice it is infinite
  reduce(DataType::kF16, ReduceOp::kSum, &sum, &largest, &largest, 1);
  EXPECT_EQ(sum, 0x7C00);
  reduce(DataType::kF16, ReduceOp::kAvg, &sum, &largest, &largest, 1, 2);
  EXPECT_EQ(sum, largest);  // but not before it is divided
  // 16 + 1 lies between 16 and 18 in e4m3; 448 is its largest, 57344 that of e5m2.
  const uint8_t sixteen = 0x58, unit = 0x38, most = 0x7E, most_e5m2 = 0x7B, infinite = 0x7C;
  const std::array<const void*, 3> bytes = {&sixteen, &unit, &unit};
  uint8_t byte = 0;
  fold(DataType::kF8E4M3, ReduceOp::kSum, &byte, bytes, 1);
  EXPECT_EQ(byte, 0x59);  // 18
  reduce(DataType::kF8E4M3, ReduceOp::kSum, &byte, &sixteen, &unit, 1);
  EXPECT_EQ(byte, 0x58);
  reduce(DataType::kF8E4M3, ReduceOp::kSum, &byte, &most, &most, 1);
  EXPECT_EQ(byte, most);
  reduce(DataType::kF8E5M2, ReduceOp::kSum, &byte, &most_e5m2, &most_e5m2, 1);
  EXPECT_EQ(byte, most_e5m2);
  reduce(DataType::kF8E5M2, ReduceOp::kSum, &byte, &most_e5m2, &infinite, 1);
  EXPECT_EQ(byte, infinite);
}

TEST_P(ReduceTest, NaNWinsAndMinusZeroIsBelowZero) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::array<float, 6> a = {nan, 1, nan, 0.0f, -0.0f, -0.0f};
  const std::array<float, 6> b = {1, nan, nan, -0.0f, 0.0f, -0.0f};
  std::array<float, 6> low{}, high{};
  reduce(DataType::kF32, ReduceOp::kMin, low.data(), a.data(), b.data(), a.size());
  reduce(DataType::kF32, ReduceOp::kMax, high.data(), a.data(), b.data(), a.size());
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(std::isnan(low[i])) << i;
    EXPECT_TRUE(std::isnan(high[i])) << i;
  }
  for (size_t i = 3; i < 6; ++i) EXPECT_TRUE(low[i] == 0 && std::signbit(low[i])) << i;
  EXPECT_FALSE(std::signbit(high[3]));
  EXPECT_FALSE(std::signbit(high[4]));
  EXPECT_TRUE(std::signbit(high[5]));
}

TEST_P(ReduceTest, IntegersWrapAndRoundTowardsZero) {
  const std::array<int8_t, 4> a = {127, -128, -7, 100}, b = {1, -1, 0, 100};
  std::array<int8_t, 4> out{};
  reduce(DataType::kI8, ReduceOp::kSum, out.data(), a.data(), b.data(), a.size());
  EXPECT_THAT(out, testing::ElementsAre(-128, 127, -7, -56));
  reduce(DataType::kI8, ReduceOp::kAvg, out.data(), a.data(), b.data(), a.size(), 2);
  EXPECT_THAT(out, testing::ElementsAre(-64, 63, -3, -28));
}

TEST(Reduce, NothingIsTouchedBehindTheEndOrForNoElements) {
  for (const DataType type : kTypes) {
    const Vector a = values(type, 40, 1), b = values(type, 40, 2);
    Vector out = values(type, 40, 3);
    const Vector before = out;
    reduce(type, ReduceOp::kSum, out.at(0), a.at(0), b.at(0), 0);
    EXPECT_EQ(out.bytes, before.bytes);
    reduce(type, ReduceOp::kSum, out.at(0), a.at(0), b.at(0), 33);
    for (size_t i = 33; i < 40; ++i) EXPECT_EQ(out.comparable(i), before.comparable(i)) << i;
  }
}

}  // namespace
}  // namespace baton::collectives::reduce
