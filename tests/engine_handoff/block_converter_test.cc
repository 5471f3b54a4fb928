// Blocks of other makes against a plain re-order, for random shapes.
#include "engine/handoff/foreign_layout.h"

#include "engine/handoff/staging.h"
#include "engine/kernels/aligned.h"
#include "tests/test.h"

namespace baton::engine::handoff {
namespace {

// A random order of the digits of (K or V, head, token, element): each axis is cut into one to
// three levels, and all levels get strides in a random order, so that they fill the block.
ForeignLayout random_layout(const KvGeometry& geometry, uint32_t block_tokens,
                            std::mt19937_64& random) {
  using kvtransfer::KvPacking;
  ForeignLayout layout = ForeignLayout::own(geometry);
  layout.block_tokens = block_tokens;
  std::shuffle(layout.layers.begin(), layout.layers.end(), random);
  const auto half = layout.heads * block_tokens * layout.head_size;
  for (KvPacking::Places* places : {&layout.key, &layout.value}) {
    std::vector<std::pair<KvPacking::Axis*, size_t>> levels;
    for (const auto& [axis, size] :
         {std::pair{&places->heads, layout.heads}, std::pair{&places->tokens, block_tokens},
          std::pair{&places->elements, layout.head_size}}) {
      axis->clear();
      uint32_t left = size;
      while (left > 1) {
        uint32_t count = left;
        if (random() % 2 == 0) {
          for (const uint32_t divisor : {2u, 4u, 16u}) {
            if (left % divisor == 0 && random() % 2 == 0) count = divisor;
          }
        }
        levels.emplace_back(axis, axis->size());
        axis->push_back({count, 0});
        left /= count;
      }
    }
    std::shuffle(levels.begin(), levels.end(), random);
    uint64_t stride = 1;
    for (const auto& [axis, number] : levels) {
      KvPacking::Level& level = (*axis)[number];
      level.stride = stride;
      stride *= level.count;
    }
    places->start = places == &layout.key ? 0 : half;
  }
  layout.dtype = random() % 2 == 0 ? kvtransfer::KvDtype::kBfloat16 : kvtransfer::KvDtype::kFloat32;
  layout.bytes = (2 * half + random() % 2 * 32) * bytes_of(layout.dtype);
  return layout;
}

struct Cache {
  Cache(const KvGeometry& geometry, size_t blocks, std::mt19937_64& random)
      : memory(geometry.cache_bytes(blocks) / 2), cache(geometry, memory.data(), blocks) {
    for (uint16_t& bits : memory)
      bits = bf16_from_float(static_cast<float>(random() % 2001) - 1000);
  }
  std::vector<uint16_t> memory;
  KvCache cache;
};

// What the layout says of one number, without the converter.
size_t place(const kvtransfer::KvPacking::Places& places, size_t head, size_t token,
             size_t element) {
  const auto step = [](const kvtransfer::KvPacking::Axis& axis, size_t number) {
    size_t at = 0;
    for (const auto& [count, stride] : axis) {
      at += number % count * stride;
      number /= count;
    }
    return at;
  };
  return places.start + step(places.heads, head) + step(places.tokens, token) +
         step(places.elements, element);
}

float number_at(const ForeignLayout& layout, const std::vector<std::byte>& block, size_t at) {
  if (layout.dtype == kvtransfer::KvDtype::kFloat32) {
    float value = 0;
    std::memcpy(&value, &block[4 * at], 4);
    return value;
  }
  uint16_t bits = 0;
  std::memcpy(&bits, &block[2 * at], 2);
  return float_from_bf16(bits);
}

TEST(BlockConverter, WritesWhatAPlainReorderDoes) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 60; ++round) {
    const KvGeometry geometry{.layers = 1 + static_cast<int>(random() % 3),
                              .kv_heads = 1 + static_cast<int>(random() % 3),
                              .head_dim = 16 << random() % 3};
    const uint32_t sizes[] = {8, 16, 32, 48, 128};
    const auto layout = random_layout(geometry, sizes[random() % 5], random);
    ASSERT_TRUE(ForeignLayout::parse(layout.say()).ok());
    EXPECT_EQ(*ForeignLayout::parse(layout.say()), layout);

    const size_t length = 1 + random() % 300;
    const size_t blocks = (length + 15) / 16;
    Cache source(geometry, blocks + 3, random), target(geometry, blocks + 2, random);
    const Cache before = target;
    std::vector<uint32_t> theirs(blocks + 3), mine(blocks + 2);
    std::iota(theirs.begin(), theirs.end(), 0u);
    std::iota(mine.begin(), mine.end(), 0u);
    std::shuffle(theirs.begin(), theirs.end(), random);
    std::shuffle(mine.begin(), mine.end(), random);
    const auto layer = static_cast<int>(random() % static_cast<uint64_t>(geometry.layers));
    const size_t begin = random() % (length / 16 + 1) * 16;  // what is wanted
    const size_t end = std::max(begin, length - random() % std::min<size_t>(length, 20));
    const size_t count = (length + layout.block_tokens - 1) / layout.block_tokens;
    for (size_t number = 0; number < count; ++number) {
      std::vector<std::byte> block(layout.bytes, std::byte{0xff});
      write_block(layout, block.data(), number, source.cache, layer,
                  {.begin = 0, .end = length, .first_block = 0, .blocks = theirs});
      for (size_t head = 0; head < layout.heads; ++head) {
        for (size_t t = 0; t < layout.block_tokens; ++t) {
          const size_t token = number * layout.block_tokens + t;
          for (size_t i = 0; i < layout.head_size; ++i) {
            float key = 0, value = 0;
            if (token < length) {
              const auto h = static_cast<int>(head);
              key = float_from_bf16(
                  source.cache.key(layer, theirs[token / 16], h)[i * 16 + token % 16]);
              value = float_from_bf16(source.cache.value(layer, theirs[token / 16],
                                                         h)[token % 16 * layout.head_size + i]);
            }
            ASSERT_EQ(number_at(layout, block, place(layout.key, head, t, i)), key);
            ASSERT_EQ(number_at(layout, block, place(layout.value, head, t, i)), value);
          }
        }
      }
      const size_t skipped = begin / 16;
      read_block(layout, block.data(), number, target.cache, layer,
                 {.begin = begin,
                  .end = end,
                  .first_block = skipped,
                  .blocks = absl::MakeConstSpan(mine).subspan(skipped)});
    }
    // The tokens that were wanted are there, and nothing else is another.
    for (size_t token = begin; token < end; ++token) {
      for (int head = 0; head < geometry.kv_heads; ++head) {
        for (int i = 0; i < geometry.head_dim; ++i) {
          const size_t key = static_cast<size_t>(i) * 16 + token % 16;
          const size_t value =
              token % 16 * static_cast<size_t>(geometry.head_dim) + static_cast<size_t>(i);
          uint16_t& key_here = target.cache.key(layer, mine[token / 16], head)[key];
          uint16_t& value_here = target.cache.value(layer, mine[token / 16], head)[value];
          ASSERT_EQ(key_here, source.cache.key(layer, theirs[token / 16], head)[key]);
          ASSERT_EQ(value_here, source.cache.value(layer, theirs[token / 16], head)[value]);
          key_here = before.memory[static_cast<size_t>(&key_here - target.memory.data())];
          value_here = before.memory[static_cast<size_t>(&value_here - target.memory.data())];
        }
      }
    }
    EXPECT_EQ(target.memory, before.memory);
  }
}

TEST(BlockConverter, RoundsAsTheEngineDoes) {
  const KvGeometry geometry{.layers = 1, .kv_heads = 1, .head_dim = 16};
  ForeignLayout layout = ForeignLayout::own(geometry);
  layout.dtype = kvtransfer::KvDtype::kFloat32;
  layout.bytes *= 2;
  std::mt19937_64 random(1);
  std::vector<float> block(2 * 16 * 16);
  for (float& value : block) value = static_cast<float>(random() % 1000003) / 1000.f - 500;
  block[0] = 1.00390625f;  // half-way between two: to the even one
  block[1] = 1.01171875f;
  Cache cache(geometry, 1, random);
  const std::vector<uint32_t> blocks = {0};
  read_block(layout, reinterpret_cast<const std::byte*>(block.data()), 0, cache.cache, 0,
             {.begin = 0, .end = 16, .first_block = 0, .blocks = blocks});
  for (size_t i = 0; i < block.size(); ++i) {
    EXPECT_EQ(cache.memory[i], bf16_from_float(block[i])) << i;
  }
  EXPECT_EQ(float_from_bf16(cache.memory[0]), 1.f);
  EXPECT_EQ(float_from_bf16(cache.memory[1]), 1.015625f);
}

// Pieces of several sizes in one range: apart, in their rows, and all given back.
TEST(Staging, PiecesNeverOverlapAndComeBack) {
  constexpr size_t kBytes = 1 << 16;
  const auto staging = *Staging::make(kBytes);
  struct Piece {
    size_t size;
    uint32_t number;
  };
  std::map<size_t, Piece> pieces;  // by where they begin
  std::mt19937_64 random(3);
  for (int round = 0; round < 20000; ++round) {
    if (random() % 5 < 3) {
      const size_t sizes[] = {192, 1024, 3000, 4096};
      const size_t size = sizes[random() % 4];
      const auto number = staging->allocate(size);
      if (!number.has_value()) continue;
      ASSERT_LT(*number, staging->pieces(size));
      const size_t begin = size * *number;
      EXPECT_EQ(staging->piece(size, *number), staging->base() + begin);
      const auto next = pieces.lower_bound(begin);
      ASSERT_TRUE(next == pieces.end() || next->first >= begin + size);
      ASSERT_TRUE(next == pieces.begin() ||
                  std::prev(next)->first + std::prev(next)->second.size <= begin);
      pieces[begin] = {size, *number};
    } else if (!pieces.empty()) {
      const auto one = std::next(pieces.begin(), static_cast<ptrdiff_t>(random() % pieces.size()));
      staging->release(one->second.size, one->second.number);
      pieces.erase(one);
    }
  }
  for (const auto& [begin, piece] : pieces) staging->release(piece.size, piece.number);
  EXPECT_EQ(staging->used(), 0u);
  EXPECT_TRUE(staging->allocate(kBytes).has_value());
  EXPECT_FALSE(staging->allocate(1).has_value());
  EXPECT_EQ(staging->pieces(kBytes + 1), 0u);
  const auto small = *Staging::make(4096);
  EXPECT_FALSE(small->allocate(5000).has_value());
}

}  // namespace
}  // namespace baton::engine::handoff
