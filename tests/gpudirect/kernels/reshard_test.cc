// Re-sharding: heads of one layout into another, as they are or as fp8 with a scale for each row.
#include "gpudirect/kernels/arithmetic-inl.h"
#include "kvtransfer/kv_requantise.h"
#include "tests/gpudirect/kernels/emulated_memory.h"
#include "tests/test.h"

namespace baton::gpudirect::kernels {
namespace {

using kvtransfer::KvLayout;
using kvtransfer::KvShape;

TEST(Arithmetic, Fp8IsTheCpusForEveryBf16Number) {
  for (uint32_t half = 0; half < 0x10000; ++half) {
    for (const float scale : {1.0f, 0.37f, 0x1p-126f}) {
      const float value = from_bf16(half) / scale;
      ASSERT_EQ(to_e4m3(value), kvtransfer::fp8_e4m3_of(value)) << half << " / " << scale;
      // Also where a division leaves no sign of NaN.
      ASSERT_EQ(to_e4m3_of_span(half, scale), kvtransfer::fp8_e4m3_of(value))
          << half << " / " << scale;
    }
  }
}

// Every number of every span that is divided by way of its scale's inverse.
TEST(Arithmetic, QuotientsHaveTheCodesOfDivisions) {
  const auto check = [](uint32_t largest, uint32_t step) {
    const SpanScale scale = fast_scale(largest);
    ASSERT_EQ(bits_of(scale.scale), bits_of(e4m3_scale(from_bf16(largest)))) << largest;
    for (uint32_t half = 0; half <= largest; half += step) {
      for (const uint32_t signed_half : {half, half | 0x8000u}) {
        const float value = from_bf16(signed_half);
        ASSERT_EQ(to_e4m3(quotient(value, scale)), to_e4m3(value / scale.scale))
            << signed_half << " of " << largest;
      }
    }
  };
  check(0, 1);
  for (uint32_t largest = 0; largest < 0x8000; ++largest) {
    if (!has_fast_scale(largest) || largest == 0) continue;
    // All where rounding could go wrong first, and at every mantissa; elsewhere exponents repeat.
    check(largest, largest < 0x1100 || largest >> 7 == 127 ? 1 : 0x7f);
    if (HasFatalFailure()) return;
  }
}

// One head of tokens [0, 16) of one block: what a plan's row is, as boxes.
struct Shapes {
  uint32_t blocks = 5, tokens = 16, heads = 4, size = 64, scales = 1;
};

KvLayout source_layout(const Shapes& shapes) {
  return KvLayout::paged({.layers = 1,
                          .blocks = shapes.blocks,
                          .block_tokens = shapes.tokens,
                          .total_heads = shapes.heads,
                          .heads = shapes.heads,
                          .head_size = shapes.size},
                         KvLayout::Order::kHnd, KvLayout::Pair::kInBlock, false);
}

// The second half of the heads, in fp8, token by token.
KvLayout target_layout(const Shapes& shapes) {
  KvShape shape{.layers = 1,
                .blocks = shapes.blocks,
                .block_tokens = shapes.tokens,
                .total_heads = shapes.heads,
                .first_head = shapes.heads / 2,
                .heads = shapes.heads / 2,
                .head_size = shapes.size,
                .dtype = kvtransfer::KvDtype::kFloat8E4M3};
  KvLayout layout = KvLayout::paged(shape, KvLayout::Order::kNhd, KvLayout::Pair::kInBlock, false);
  shape.head_size = shapes.scales;
  shape.dtype = kvtransfer::KvDtype::kFloat32;
  const KvLayout extra =
      KvLayout::paged(shape, KvLayout::Order::kNhd, KvLayout::Pair::kSplit, false);
  for (kvtransfer::KvField field : extra.groups[0].fields) {
    field.role = field.role == kvtransfer::KvRole::kKey ? kvtransfer::KvRole::kKeyScale
                                                        : kvtransfer::KvRole::kValueScale;
    for (auto& place : field.places) ++place.buffer;
    layout.groups[0].fields.push_back(field);
  }
  layout.fit_buffers();
  return layout;
}

struct Buffers {
  explicit Buffers(const KvLayout& layout) {
    for (const auto& buffer : layout.buffers) {
      bytes.emplace_back(buffer.bytes, std::byte{0x55});
      pointers.push_back(bytes.back().data());
    }
  }
  std::vector<std::vector<std::byte>> bytes;
  std::vector<std::byte*> pointers;
};

// A box for each block and field: heads and tokens are its dimensions.
std::vector<RowBox> boxes_of(const Shapes& shapes, const KvLayout& source, const KvLayout& target,
                             const std::vector<uint32_t>& here, const std::vector<uint32_t>& there,
                             const Buffers& from, const Buffers& to) {
  std::vector<RowBox> boxes;
  for (size_t field = 0; field < 2; ++field) {
    const auto& s = source.groups[0].fields[field];
    const auto& t = target.groups[0].fields[field];
    const auto& c = target.groups[0].fields[field + 2];
    for (size_t i = 0; i < here.size(); ++i) {
      RowBox box;
      box.from = from.pointers[s.places[0].buffer] + s.places[0].offset + here[i] * s.block_stride +
                 shapes.heads / 2 * s.head_stride;
      box.to = to.pointers[t.places[0].buffer] + t.places[0].offset + there[i] * t.block_stride;
      box.scales = to.pointers[c.places[0].buffer] + c.places[0].offset + there[i] * c.block_stride;
      box.count[1] = shapes.tokens;
      box.count[2] = shapes.heads / 2;
      for (const auto& [strides, of] :
           {std::pair(box.from_stride, &s), std::pair(box.to_stride, &t),
            std::pair(box.scale_stride, &c)}) {
        strides[1] = static_cast<int64_t>(of->token_stride);
        strides[2] = static_cast<int64_t>(of->head_stride);
      }
      boxes.push_back(box);
    }
  }
  return boxes;
}

TEST(Reshard, ConvertsToTheBytesOfTheCpusPlan) {
  for (const Shapes& shapes :
       {Shapes{}, Shapes{.size = 128, .scales = 4}, Shapes{.size = 30, .scales = 3},
        Shapes{.size = 256}, Shapes{.size = 80}, Shapes{.size = 24, .scales = 3},
        Shapes{.size = 320}, Shapes{.tokens = 5, .heads = 2, .size = 96}}) {
    const KvLayout source = source_layout(shapes), target = target_layout(shapes);
    Buffers from(source), wanted(target), got(target);
    std::mt19937_64 random(shapes.size);
    // NaN and all in some rows, in others none, zeros alone, or tiny numbers.
    for (size_t i = 0; i < from.bytes[0].size(); i += 2) {
      uint16_t half = static_cast<uint16_t>(random());
      if (i / 2 / shapes.size % 3 != 0) half = static_cast<uint16_t>(half & 0xbfff);
      if (i / 2 / shapes.size % 7 == 1) half &= 0x8000;
      if (i / 2 / shapes.size % 7 == 2) half = static_cast<uint16_t>(half % 0x1200);
      std::memcpy(from.bytes[0].data() + i, &half, sizeof half);
    }
    const std::vector<uint32_t> here = {3, 1, 4}, there = {0, 2, 1};
    const auto plan = kvtransfer::KvRequantisePlan::make(source, target);
    ASSERT_TRUE(plan.ok()) << plan.status();
    const std::vector<const std::byte*> read(from.pointers.begin(), from.pointers.end());
    ASSERT_TRUE(
        plan->run(0, {0, 3 * shapes.tokens}, {0, here}, {0, there}, read, wanted.pointers).ok());
    const std::vector<RowBox> boxes = boxes_of(shapes, source, target, here, there, from, got);
    EmulatedMemory memory;
    memory.allow(boxes);
    memory.allow(from.bytes[0]);
    for (auto& buffer : got.bytes) memory.allow(buffer, true);
    const Reshard arguments{
        boxes.data(), static_cast<uint32_t>(boxes.size()), shapes.tokens * shapes.heads / 2,
        shapes.size,  shapes.size / shapes.scales,         Conversion::kBf16ToFp8E4m3};
    for (uint64_t seed = 0; seed < 3; ++seed) {
      ASSERT_EQ(run_kernel("baton_reshard", arguments, 4, memory, seed), std::nullopt);
      EXPECT_TRUE(got.bytes == wanted.bytes) << shapes.size;
    }
  }
}

TEST(Reshard, MovesRowsAsTheyAre) {
  constexpr uint32_t kRow = 72;
  std::vector<std::byte> from(4 * 3 * 2 * kRow), to(from.size());
  std::mt19937_64 random(1);
  for (std::byte& byte : from) byte = static_cast<std::byte>(random());
  // [4][3][2] rows to [2][4][3].
  std::vector<RowBox> boxes(1);
  boxes[0] = {.from = from.data(),
              .to = to.data(),
              .count = {4, 3, 2},
              .from_stride = {6 * kRow, 2 * kRow, kRow},
              .to_stride = {3 * kRow, kRow, 12 * kRow}};
  EmulatedMemory memory;
  memory.allow(boxes);
  memory.allow(from);
  memory.allow(to, true);
  const Reshard arguments{boxes.data(), 1, 24, kRow, kRow, Conversion::kNone};
  ASSERT_EQ(run_kernel("baton_reshard", arguments, 2, memory), std::nullopt);
  for (uint32_t i = 0; i < 4; ++i) {
    for (uint32_t j = 0; j < 3; ++j) {
      for (uint32_t k = 0; k < 2; ++k) {
        ASSERT_EQ(std::memcmp(&from[((i * 3 + j) * 2 + k) * kRow],
                              &to[((k * 4 + i) * 3 + j) * kRow], kRow),
                  0);
      }
    }
  }
}

}  // namespace
}  // namespace baton::gpudirect::kernels
