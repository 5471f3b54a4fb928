// Requantising: the fast loop against the plain one, and the plain one against the definition.
#include "kvtransfer/kv_requantise.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "tests/kvtransfer/requantise/fp8_layout.h"

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

struct Memory {
  explicit Memory(const KvLayout& layout) {
    for (const KvBuffer& buffer : layout.buffers) bytes.emplace_back(buffer.bytes, std::byte{0x55});
    for (auto& buffer : bytes) pointers.push_back(buffer.data());
  }
  std::vector<std::vector<std::byte>> bytes;
  std::vector<std::byte*> pointers;
};

TEST(Requantise, TheFastLoopDoesWhatThePlainOneDoes) {
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
    Memory fast(target), plain(target);
    std::vector<const std::byte*> read(from.pointers.begin(), from.pointers.end());
    const KvTokens tokens{1, 17};
    ASSERT_TRUE(plan->run(0, tokens, {0, here}, {0, goal}, read, fast.pointers).ok());
    ASSERT_TRUE(plan->run_reference(0, tokens, {0, here}, {0, goal}, read, plain.pointers).ok());
    EXPECT_EQ(fast.bytes, plain.bytes);
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
