// Token by token, head by head: by the places that a layout says.
#include "engine/handoff/block_converter.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "engine/kernels/aligned.h"

namespace baton::engine::handoff {
namespace {

using kvtransfer::KvDtype;
using kvtransfer::KvPacking;

// Where the keys or the values of a block lie: number (head h, token t, element e) is at start +
// heads[h] + tokens[t] + elements[e].
struct Steps {
  explicit Steps(const KvPacking::Places& places)
      : start(places.start),
        heads(steps_of(places.heads)),
        tokens(steps_of(places.tokens)),
        elements(steps_of(places.elements)) {}
  uint64_t start;
  std::vector<uint64_t> heads, tokens, elements;
};

template <KvDtype kDtype>
uint16_t load(const std::byte* block, size_t at) {
  if constexpr (kDtype == KvDtype::kBfloat16) {
    uint16_t bits = 0;
    std::memcpy(&bits, block + 2 * at, 2);
    return bits;
  } else {
    float value = 0;
    std::memcpy(&value, block + 4 * at, 4);
    return bf16_from_float(value);
  }
}

template <KvDtype kDtype>
void store(std::byte* block, size_t at, uint16_t bits) {
  if constexpr (kDtype == KvDtype::kBfloat16) {
    std::memcpy(block + 2 * at, &bits, 2);
  } else {
    const float value = float_from_bf16(bits);
    std::memcpy(block + 4 * at, &value, 4);
  }
}

// Calls move(own number, place in the foreign block) for all that `tokens` and block `number`
// share.
template <typename Move>
void for_each_number(const ForeignLayout& layout, size_t number, const KvCache& cache, int layer,
                     const OwnTokens& tokens, Move move) {
  const size_t first = number * layout.block_tokens;
  const size_t begin = std::max(tokens.begin, first);
  const size_t end = std::min(tokens.end, first + layout.block_tokens);
  const auto size = static_cast<size_t>(cache.geometry().head_dim);
  const Steps keys(layout.key), values(layout.value);
  const uint32_t own_end = tokens.first_head + static_cast<uint32_t>(cache.geometry().kv_heads);
  const uint32_t first_head = std::max(layout.first_head, tokens.first_head);
  const uint32_t end_head = std::min(layout.held().end, own_end);
  for (size_t token = begin; token < end; ++token) {
    const uint32_t block = tokens.blocks[token / kBlockTokens - tokens.first_block];
    const size_t slot = token % kBlockTokens;
    for (uint32_t head = first_head; head < end_head; ++head) {
      const auto own = static_cast<int>(head - tokens.first_head);
      const uint32_t its = head - layout.first_head;
      uint16_t* key = cache.key(layer, block, own) + slot;
      uint16_t* value = cache.value(layer, block, own) + slot * size;
      const size_t key_at = keys.start + keys.heads[its] + keys.tokens[token - first];
      const size_t value_at = values.start + values.heads[its] + values.tokens[token - first];
      for (size_t i = 0; i < size; ++i) {
        move(key[i * kBlockTokens], key_at + keys.elements[i]);
        move(value[i], value_at + values.elements[i]);
      }
    }
  }
}

template <KvDtype kDtype>
void read_as(const ForeignLayout& layout, const std::byte* foreign, size_t number,
             const KvCache& cache, int layer, const OwnTokens& tokens) {
  for_each_number(layout, number, cache, layer, tokens,
                  [&](uint16_t& own, size_t at) { own = load<kDtype>(foreign, at); });
}

template <KvDtype kDtype>
void write_as(const ForeignLayout& layout, std::byte* foreign, size_t number, const KvCache& cache,
              int layer, const OwnTokens& tokens) {
  for_each_number(layout, number, cache, layer, tokens,
                  [&](const uint16_t& own, size_t at) { store<kDtype>(foreign, at, own); });
}

}  // namespace

void read_block(const ForeignLayout& layout, const std::byte* foreign, size_t number,
                const KvCache& cache, int layer, const OwnTokens& tokens) {
  const auto read =
      layout.dtype == KvDtype::kBfloat16 ? read_as<KvDtype::kBfloat16> : read_as<KvDtype::kFloat32>;
  read(layout, foreign, number, cache, layer, tokens);
}

void write_block(const ForeignLayout& layout, std::byte* foreign, size_t number,
                 const KvCache& cache, int layer, const OwnTokens& tokens) {
  const size_t first = number * layout.block_tokens;
  const bool whole = tokens.begin <= first && tokens.end >= first + layout.block_tokens;
  const size_t numbers = size_t{2} * layout.heads * layout.block_tokens * layout.head_size;
  if (!whole || numbers * bytes_of(layout.dtype) != layout.bytes) {
    std::memset(foreign, 0, layout.bytes);
  }
  const auto write = layout.dtype == KvDtype::kBfloat16 ? write_as<KvDtype::kBfloat16>
                                                        : write_as<KvDtype::kFloat32>;
  write(layout, foreign, number, cache, layer, tokens);
}

}  // namespace baton::engine::handoff
