// The paged KV cache: where the keys and values of every token lie, in memory given from outside.
//
// A block holds kBlockTokens = 16 consecutive tokens of one sequence. The buffer is laid out
//
//   [layer][block][kv_head]{ K: [head_dim][16], V: [16][head_dim] }      all bf16
//
// so that (layer, block) is one contiguous run of KvGeometry::block_bytes() bytes: the unit that
// is transferred. K is transposed inside its block: decode attention then reads 16 keys per
// vector. Slots past the end of a sequence hold arbitrary bytes and are never used in arithmetic.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"

namespace baton::engine {

inline constexpr int kBlockTokens = 16;

struct KvGeometry {
  int layers = 0;
  int kv_heads = 0;
  int head_dim = 0;
  int block_tokens = kBlockTokens;

  // Bytes of one block of one layer; contiguous.
  size_t block_bytes() const { return size_t{2} * kv_heads * 2 * head_dim * block_tokens; }
  // Bytes that `num_blocks` blocks of every layer need.
  size_t cache_bytes(size_t num_blocks) const { return block_bytes() * num_blocks * layers; }
  // Bytes of KV that one token adds, all layers.
  size_t token_bytes() const { return block_bytes() / block_tokens * layers; }
  // The offset in bytes of block `block` of layer `layer` from the cache's base.
  size_t block_offset(int layer, size_t block, size_t num_blocks) const {
    return (static_cast<size_t>(layer) * num_blocks + block) * block_bytes();
  }
  // Blocks that hold `tokens` tokens.
  size_t blocks_for(size_t tokens) const { return (tokens + block_tokens - 1) / block_tokens; }

  friend bool operator==(const KvGeometry&, const KvGeometry&) = default;
};

// A view; does not own the memory. Copyable. Not synchronised: two threads may use different
// blocks at the same time, never the same (layer, block) if one of them writes.
class KvCache {
 public:
  // `base` holds geometry.cache_bytes(num_blocks) bytes, aligned to 64 (pool slabs are).
  KvCache(KvGeometry geometry, void* base, size_t num_blocks)
      : geometry_(geometry), base_(static_cast<std::byte*>(base)), num_blocks_(num_blocks) {}

  const KvGeometry& geometry() const { return geometry_; }
  size_t num_blocks() const { return num_blocks_; }
  std::byte* base() const { return base_; }

  // All bytes of one block of one layer.
  std::span<std::byte> block(int layer, size_t block) const {
    return {base_ + geometry_.block_offset(layer, block, num_blocks_), geometry_.block_bytes()};
  }
  // K of one head: [head_dim][16] bf16.
  uint16_t* key(int layer, size_t block, int head) const {
    return reinterpret_cast<uint16_t*>(base_ + geometry_.block_offset(layer, block, num_blocks_)) +
           size_t{2} * head * geometry_.head_dim * geometry_.block_tokens;
  }
  // V of one head: [16][head_dim] bf16, directly behind its K.
  uint16_t* value(int layer, size_t block, int head) const {
    return key(layer, block, head) + size_t{1} * geometry_.head_dim * geometry_.block_tokens;
  }

 private:
  KvGeometry geometry_;
  std::byte* base_;
  size_t num_blocks_;
};

}  // namespace baton::engine
