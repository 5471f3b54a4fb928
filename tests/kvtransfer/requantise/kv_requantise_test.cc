// Requantising: the fast loop against the plain one, and the plain one against the definition.
#include "kvtransfer/kv_requantise.h"

#include "hwy/targets.h"
#include "kvtransfer/plans/fp8_rows.h"
#include "kvtransfer/plans/kv_boxes.h"
#include "tests/kvtransfer/requantise/fp8_layout.h"
#include "tests/test.h"

namespace baton::kvtransfer {
namespace {

using ::testing::HasSubstr;

TEST(Fp8, EveryCodeIsItsOwnNearest) {
  for (int code = 0; code < 256; ++code) {
    const float value = float_of_fp8_e4m3(static_cast<uint8_t>(code));
    EXPECT_EQ(fp8_e4m3_of(value), code);
  }
  EXPECT_EQ(float_of_fp8_e4m3(0x7e), 448.0f);
  EXPECT_EQ(float_of_fp8_e4m3(0x01), std::ldexp(1.0f, -9));
  EXPECT_EQ(float_of_fp8_e4m3(0x08), std::ldexp(1.0f, -6));
  EXPECT_EQ(fp8_e4m3_of(1e30f), 0x7e);
  EXPECT_EQ(fp8_e4m3_of(-1e30f), 0xfe);
  EXPECT_EQ(fp8_e4m3_of(std::numeric_limits<float>::infinity()), 0x7f);
  EXPECT_EQ(fp8_e4m3_of(-std::numeric_limits<float>::quiet_NaN()) & 0x7f, 0x7f);
  EXPECT_EQ(fp8_e4m3_of(-0.0f), 0x80);
}

TEST(Fp8, HalfWayGoesToTheEvenCode) {
  for (uint8_t code = 0; code < 0x7e; ++code) {
    const float low = float_of_fp8_e4m3(code);
    const float high = float_of_fp8_e4m3(code + 1);
    const float middle = (low + high) / 2;
    EXPECT_EQ(fp8_e4m3_of(middle), code % 2 == 0 ? code : code + 1) << middle;
    EXPECT_EQ(fp8_e4m3_of(std::nextafter(middle, 0.0f)), code);
    EXPECT_EQ(fp8_e4m3_of(std::nextafter(middle, 1000.0f)), code + 1);
  }
}

// Rows by vectors, for every instruction set of this machine, against one element after the other.
class Fp8RowsOn : public ::testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override { use(GetParam()); }
  void TearDown() override { use(0); }
  static void use(int64_t targets) {
    hwy::SetSupportedTargetsForTest(targets);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
};

// Those that the loop is compiled for.
std::vector<int64_t> targets() {
  std::vector<int64_t> out;
  for (const int64_t target :
       {int64_t{HWY_AVX3}, int64_t{HWY_AVX2}, int64_t{HWY_SSE4}, int64_t{HWY_STATIC_TARGET}}) {
    if ((hwy::SupportedTargets() & target) != 0) out.push_back(target);
  }
  return out;
}

INSTANTIATE_TEST_SUITE_P(Requantise, Fp8RowsOn, ::testing::ValuesIn(targets()),
                         [](const auto& target) { return hwy::TargetName(target.param); });

// One row, one scale.
template <typename T>
void expect_row(const std::vector<T>& row) {
  const auto value_of = [](T bits) {
    return std::bit_cast<float>(sizeof(T) == 2 ? uint32_t{bits} << 16 : uint32_t{bits});
  };
  std::vector<std::byte> codes(row.size());
  float scale = 0, largest = 0;
  rows_to_fp8({.from = reinterpret_cast<const std::byte*>(row.data()),
               .to = codes.data(),
               .scales = reinterpret_cast<std::byte*>(&scale),
               .rows = 1,
               .from_element = sizeof(T),
               .to_element = 1,
               .scale_element = 4,
               .width = row.size(),
               .scales_of_row = 1,
               .is_fp32 = sizeof(T) == 4});
  for (const T bits : row) {
    const float magnitude = std::fabs(value_of(bits));
    if (std::isfinite(magnitude)) largest = std::max(largest, magnitude);
  }
  ASSERT_EQ(scale, largest == 0 ? 1 : std::max(largest / 448, std::numeric_limits<float>::min()));
  size_t wrong = 0;
  for (size_t i = 0; i < row.size(); ++i) {
    if (static_cast<uint8_t>(codes[i]) == fp8_e4m3_of(value_of(row[i]) / scale)) continue;
    if (++wrong > 3) continue;
    ADD_FAILURE() << value_of(row[i]) << " by " << scale << " became " << int(codes[i]);
  }
  ASSERT_EQ(wrong, 0u);
}

// The scale's digits are those of the largest number's seven bits; and its power decides what is
// too small to be anything, and which way is taken.
TEST_P(Fp8RowsOn, EveryBf16NumberByEveryScale) {
  for (const int power : {1, 20, 70, 127, 254}) {
    for (int digits = 0; digits < 128; digits += power == 127 ? 1 : 21) {
      const int largest = power << 7 | digits;
      std::vector<uint16_t> row;
      for (int bits = 0; bits <= largest; ++bits) {
        row.push_back(static_cast<uint16_t>(bits | (bits * 7 & 0x40) << 9));
      }
      ASSERT_NO_FATAL_FAILURE(expect_row(row)) << power << " " << digits;
    }
  }
}

TEST_P(Fp8RowsOn, NaNs) {
  std::vector<uint16_t> all(65536);
  std::iota(all.begin(), all.end(), uint16_t{0});
  ASSERT_NO_FATAL_FAILURE(expect_row(all));
  ASSERT_NO_FATAL_FAILURE(expect_row(std::vector<uint16_t>{0x7f80, 0xffc0, 0x7f81}));
  ASSERT_NO_FATAL_FAILURE(expect_row(std::vector<uint32_t>(70, 0xff800000)));
  ASSERT_NO_FATAL_FAILURE(expect_row(std::vector<uint32_t>{0x7f7fffff, 0x7f800001, 0, 0x80000001}));
}

// fp32 next to where two codes are as near.
TEST_P(Fp8RowsOn, HalfWaysOfManyScales) {
  std::mt19937 random(5);
  for (int scales = 0; scales < 300; ++scales) {
    const float largest = std::ldexp(1 + static_cast<float>(random() % (1 << 23)) / (1 << 23),
                                     static_cast<int>(random() % 200) - 90);
    const float scale = largest / 448;
    std::vector<uint32_t> row = {std::bit_cast<uint32_t>(largest)};
    for (uint8_t code = 0; code < 0x7e; ++code) {
      const float middle = (float_of_fp8_e4m3(code) + float_of_fp8_e4m3(code + 1)) / 2 * scale;
      for (uint32_t bits = std::bit_cast<uint32_t>(middle) - 3, i = 0; i < 7; ++i) {
        if (bits + i < row[0]) row.push_back((bits + i) | (i % 2) << 31);
      }
    }
    ASSERT_NO_FATAL_FAILURE(expect_row(row)) << largest;
  }
}

// Every width, several scales, rows apart, at odd addresses, in memory that ends where they end;
// elements that lie apart on either side.
TEST_P(Fp8RowsOn, OddPlaces) {
  std::mt19937 random(9);
  for (size_t width = 1; width <= 70; ++width) {
    for (const bool is_fp32 : {false, true}) {
      for (const size_t lanes : {1, 3, 17}) {  // rows between an element and the next, or none
        const size_t bytes = is_fp32 ? 4 : 2, scales = width % 3 == 0 ? 3 : 1;
        const size_t rows = lanes == 1 ? 19 : lanes;
        Fp8Rows x{.rows = rows,
                  .from_step = lanes == 1 ? width * bytes + 3 : bytes,
                  .to_step = lanes == 3 ? 1 : width,
                  .scales_step = scales * 4 + 1,
                  .from_element = lanes == 1 ? bytes : bytes * lanes,
                  .to_element = lanes == 3 ? rows : 1,
                  .scale_element = 4,
                  .width = width,
                  .scales_of_row = scales,
                  .is_fp32 = is_fp32};
        std::vector<std::byte> from(1 + (rows - 1) * x.from_step + (width - 1) * x.from_element +
                                    bytes);
        for (std::byte& byte : from) byte = static_cast<std::byte>(random());
        std::vector<std::byte> to(1 + (rows - 1) * x.to_step + (width - 1) * x.to_element + 1);
        std::vector<std::byte> kept(1 + (rows - 1) * x.scales_step + scales * 4);
        x.from = from.data() + 1;
        x.to = to.data() + 1;
        x.scales = kept.data() + 1;
        rows_to_fp8(x);
        for (size_t i = 0; i < rows * width; ++i) {
          const size_t row = i / width, at = i % width;
          float scale, value;
          std::memcpy(&scale, x.scales + row * x.scales_step + at / (width / scales) * 4, 4);
          uint32_t bits = 0;
          std::memcpy(reinterpret_cast<std::byte*>(&bits) + 4 - bytes,
                      x.from + row * x.from_step + at * x.from_element, bytes);
          value = std::bit_cast<float>(bits);
          ASSERT_EQ(int(x.to[row * x.to_step + at * x.to_element]), fp8_e4m3_of(value / scale))
              << width << " " << is_fp32 << " " << lanes << " " << i;
        }
      }
    }
  }
}

struct Memory {
  explicit Memory(const KvLayout& layout) {
    for (const KvBuffer& buffer : layout.buffers) bytes.emplace_back(buffer.bytes, std::byte{0x55});
    for (auto& buffer : bytes) pointers.push_back(buffer.data());
  }
  std::vector<std::vector<std::byte>> bytes;
  std::vector<std::byte*> pointers;
};

// Each code is that of its element, where the layouts say that the two lie.
struct Blocks {
  const std::vector<uint32_t>&from, &to;
};
void expect_each_element(const KvLayout& source, const KvLayout& target, const Blocks& blocks,
                         KvTokens tokens, const Memory& from, const Memory& to) {
  const KvGroup &a = source.groups[0], &b = target.groups[0];
  const auto at = [](const Memory& memory, const KvGroup& group, const KvField& field,
                     const std::vector<uint32_t>& pages, size_t layer, uint64_t token,
                     uint32_t head, uint32_t element) {
    return memory.bytes[field.places[layer].buffer].data() + field.places[layer].offset +
           pages[token / group.block_tokens] * field.block_stride +
           token % group.block_tokens * field.token_stride +
           (head - group.first_head) * field.head_stride + element * field.element_stride;
  };
  for (size_t f = 0; f < a.fields.size(); ++f) {
    const bool key = a.fields[f].role == KvRole::kKey;
    const KvField& value = *find_role(b, key ? KvRole::kKey : KvRole::kValue);
    const KvField& scale = *find_role(b, key ? KvRole::kKeyScale : KvRole::kValueScale);
    const size_t bytes = a.fields[f].dtype == KvDtype::kFloat32 ? 4 : 2;
    for (uint32_t i = 0; i < 2 * (tokens.end - tokens.begin) * b.heads * value.width; ++i) {
      const uint32_t element = i % value.width, head = b.first_head + i / value.width % b.heads;
      const uint64_t token = tokens.begin + i / value.width / b.heads / 2;
      const size_t layer = i / value.width / b.heads % 2;
      uint32_t bits = 0;
      std::memcpy(reinterpret_cast<std::byte*>(&bits) + 4 - bytes,
                  at(from, a, a.fields[f], blocks.from, layer, token, head, element), bytes);
      float by;
      std::memcpy(
          &by,
          at(to, b, scale, blocks.to, layer, token, head, element / (value.width / scale.width)),
          4);
      ASSERT_EQ(int(*at(to, b, value, blocks.to, layer, token, head, element)),
                fp8_e4m3_of(std::bit_cast<float>(bits) / by))
          << "layer " << layer << " token " << token << " head " << head << " at " << element;
    }
  }
}

TEST(Requantise, EachElementIsWhatTheDefinitionSays) {
  for (uint32_t seed = 0; seed < 40; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    KvShape shape{.layers = 2,
                  .blocks = 9,
                  .block_tokens = 4 + static_cast<uint32_t>(random() % 9),
                  .total_heads = 4,
                  .heads = 4,
                  .head_size = 24,
                  .dtype = seed % 4 == 3 ? KvDtype::kFloat32 : KvDtype::kBfloat16};
    const KvLayout source = seed % 2 == 0 ? KvLayout::transposed_keys(shape)
                                          : KvLayout::paged(shape, KvLayout::Order::kHnd,
                                                            KvLayout::Pair::kJoined, true);
    KvShape there = shape;
    there.block_tokens = 3 + static_cast<uint32_t>(random() % 9);
    there.first_head = static_cast<uint32_t>(random() % 3);
    there.heads = 2;
    const KvLayout target =
        fp8_layout(there, seed % 3 == 0 ? KvLayout::Order::kNhd : KvLayout::Order::kHnd,
                   seed % 5 == 0 ? 3 : 1);
    const auto plan = KvRequantisePlan::make(source, target);
    ASSERT_TRUE(plan.ok()) << plan.status();
    Memory from(source);
    for (auto& buffer : from.bytes) {
      for (std::byte& byte : buffer) byte = static_cast<std::byte>(random());  // NaN and all
    }
    const std::vector<uint32_t> here = {3, 7, 1, 0, 5};
    const std::vector<uint32_t> goal = {8, 2, 6, 1, 0, 4, 7};
    Memory fast(target);
    std::vector<const std::byte*> read(from.pointers.begin(), from.pointers.end());
    const KvTokens tokens{1, 17};
    ASSERT_TRUE(plan->run(0, tokens, {0, here}, {0, goal}, read, fast.pointers).ok());
    expect_each_element(source, target, {here, goal}, tokens, from, fast);
    EXPECT_NE(fast.bytes, Memory(target).bytes);
  }
}

// Layers that only one side has stay as they are, and so do those that were not asked for.
TEST(Requantise, LayersThatBothHaveAreConverted) {
  KvShape shape{
      .layers = 3, .blocks = 2, .block_tokens = 4, .total_heads = 2, .heads = 2, .head_size = 8};
  KvLayout source = KvLayout::paged(shape, KvLayout::Order::kNhd, KvLayout::Pair::kSplit, true);
  KvLayout target = fp8_layout(shape, KvLayout::Order::kNhd, 1);
  source.groups[0].layers = {0, 2, 5};
  target.groups[0].layers = {2, 4, 5};
  const auto plan = KvRequantisePlan::make(source, target);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_FALSE(plan->complete());
  ASSERT_EQ(plan->parts()[0].layers.size(), 2u);
  Memory from(source);
  for (auto& buffer : from.bytes) {
    for (size_t i = 0; i < buffer.size(); ++i) buffer[i] = static_cast<std::byte>(i % 60);
  }
  const std::vector<const std::byte*> read(from.pointers.begin(), from.pointers.end());
  const std::vector<uint32_t> pages = {1, 0};
  const auto places = [&](const Memory& memory, size_t layer) {
    return memory.bytes[0][target.groups[0].fields[0].places[layer].offset];
  };
  Memory one(target), all(target);
  ASSERT_TRUE(plan->run(0, {0, 8}, {0, pages}, {0, pages}, read, one.pointers, {1, 2}).ok());
  EXPECT_EQ(places(one, 0), std::byte{0x55});
  EXPECT_NE(places(one, 2), std::byte{0x55});
  ASSERT_TRUE(plan->run(0, {0, 8}, {0, pages}, {0, pages}, read, all.pointers).ok());
  EXPECT_NE(places(all, 0), std::byte{0x55});
  EXPECT_EQ(places(all, 1), std::byte{0x55});
  EXPECT_EQ(places(all, 2), places(one, 2));
}

TEST(Requantise, ErrorsAreAtMostHalfAStep) {
  const KvShape shape{.layers = 1,
                      .blocks = 1,
                      .block_tokens = 16,
                      .total_heads = 1,
                      .heads = 1,
                      .head_size = 64,
                      .dtype = KvDtype::kFloat32};
  const KvLayout source =
      KvLayout::paged(shape, KvLayout::Order::kNhd, KvLayout::Pair::kSplit, false);
  const KvLayout target = fp8_layout(shape, KvLayout::Order::kNhd, 1);
  Memory from(source), to(target);
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (auto& buffer : from.bytes) {
    for (size_t i = 0; i < buffer.size(); i += 4) {
      const float value = i < 256 ? 0 : normal(random) * std::ldexp(1.0f, int(i % 40) - 60);
      std::memcpy(&buffer[i], &value, 4);
    }
  }
  const std::vector<uint32_t> page = {0};
  std::vector<const std::byte*> read(from.pointers.begin(), from.pointers.end());
  const auto plan = KvRequantisePlan::make(source, target);
  ASSERT_TRUE(plan.ok()) << plan.status();
  ASSERT_TRUE(plan->run(0, {0, 16}, {0, page}, {0, page}, read, to.pointers).ok());
  for (size_t row = 0; row < 16; ++row) {
    float scale;
    std::memcpy(&scale, &to.bytes[1][row * 4], 4);
    if (row == 0) {
      EXPECT_EQ(scale, 1.0f);  // a row of zeros
    }
    for (size_t e = 0; e < 64; ++e) {
      float value;
      std::memcpy(&value, &from.bytes[0][(row * 64 + e) * 4], 4);
      const float code = float_of_fp8_e4m3(static_cast<uint8_t>(to.bytes[0][row * 64 + e]));
      EXPECT_LE(std::fabs(code * scale - value), std::max(std::fabs(value) / 15, scale / 1000));
    }
  }
}

TEST(Requantise, OtherTypesAndBadPagesAreRefused) {
  const KvShape shape{
      .layers = 1, .blocks = 2, .block_tokens = 16, .total_heads = 1, .heads = 1, .head_size = 8};
  const KvLayout source = KvLayout::transposed_keys(shape);
  const KvLayout target = fp8_layout(shape, KvLayout::Order::kNhd, 1);
  const auto why = [&](const KvLayout& from, const KvLayout& to) {
    const absl::Status status = KvRequantisePlan::make(from, to).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(why(source, source), HasSubstr("without values and scales"));
  EXPECT_THAT(why(target, target), HasSubstr("do not match"));
  EXPECT_THAT(why(source, fp8_layout(shape, KvLayout::Order::kNhd, 3)), HasSubstr("3 scales"));
  KvLayout other = target;
  other.model.weights = "another";
  EXPECT_THAT(why(source, other), HasSubstr("same checkpoint"));
  other = target;
  other.groups[0].fields.push_back(other.groups[0].fields[0]);
  other.groups[0].fields.back().role = KvRole::kRopeKey;
  for (KvPlace& place : other.groups[0].fields.back().places) place.buffer = 3;
  other.buffers.push_back(other.buffers[0]);
  EXPECT_THAT(why(source, other), HasSubstr("rotated part of K is missing"));
  const auto plan = KvRequantisePlan::make(source, target);
  Memory from(source), to(target);
  std::vector<const std::byte*> read(from.pointers.begin(), from.pointers.end());
  const std::vector<uint32_t> page = {0}, outside = {2};
  EXPECT_TRUE(plan->run(0, {0, 16}, {0, page}, {0, page}, read, to.pointers).ok());
  const auto refused = [&](const absl::Status& status) { return absl::IsInvalidArgument(status); };
  EXPECT_TRUE(refused(plan->run(0, {0, 17}, {0, page}, {0, page}, read, to.pointers)));
  EXPECT_TRUE(refused(plan->run(0, {0, 16}, {0, page}, {0, outside}, read, to.pointers)));
  EXPECT_TRUE(refused(plan->run(1, {0, 16}, {0, page}, {0, page}, read, to.pointers)));
  EXPECT_TRUE(refused(plan->run(0, {0, 16}, {0, page}, {0, page}, {}, to.pointers)));
}

}  // namespace
}  // namespace baton::kvtransfer
