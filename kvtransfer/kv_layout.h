// KV layouts and plans: how a worker lays out its paged KV cache, and which boxes go where when two
// workers lay it out differently.
//
// A cache is [layer][block][head]{one head's K and V of one block}, with any strides. A worker of a
// tensor-parallel group holds heads [first_head, first_head + heads) of the model's total_heads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "transport/layout.h"

namespace baton::kvtransfer {

struct KvLayout {
  uint32_t layers = 0;
  uint32_t blocks = 0;        // of this worker's cache
  uint32_t block_tokens = 0;  // tokens in a block
  uint32_t total_heads = 0;   // KV heads of the model
  uint32_t first_head = 0;    // this shard's
  uint32_t heads = 0;
  uint32_t head_bytes = 0;    // K and V of one head of one block, contiguous
  uint64_t layer_stride = 0;  // bytes
  uint64_t block_stride = 0;
  uint64_t head_stride = 0;
  std::string format;  // what lies inside a head: "bf16 K[d][t] V[t][d]"; must be equal
  // What computes the KV: a hash over weights and config, or a name that stands for them; must be
  // equal, for with the KV of another checkpoint of the same shape the text would be wrong.
  std::string model;

  // The cache without gaps: [layer][block][head], each head directly behind the one before.
  static KvLayout dense(uint32_t layers, uint32_t blocks, uint32_t block_tokens, uint32_t heads,
                        uint32_t head_bytes, std::string format);

  // From offset 0 to the last byte used. Saturates at UINT64_MAX where the true number overflows.
  uint64_t bytes() const;
  // InvalidArgument: counts of zero or beyond reason, heads outside the model's, strides with which
  // two pieces would overlap, a size that overflows.
  absl::Status check() const;
  // Blocks that hold `tokens` tokens.
  uint64_t blocks_for(uint64_t tokens) const { return (tokens + block_tokens - 1) / block_tokens; }

  // For messages to a peer. decode() returns only layouts that pass check().
  std::string encode() const;
  static absl::StatusOr<KvLayout> decode(std::string_view bytes);

  bool operator==(const KvLayout&) const = default;

  static constexpr uint32_t kMaxLayers = 4096;
  static constexpr size_t kMaxFormat = 128;
  static constexpr size_t kMaxModel = 128;
  static constexpr size_t kMaxEncoded = 7 * 4 + 3 * 8 + 2 + kMaxFormat + 2 + kMaxModel;
};

// One box of a plan: these heads of every block go from one worker to the other.
struct KvBox {
  uint64_t source_offset = 0;  // of the box inside a block of the source
  uint64_t target_offset = 0;
  uint32_t heads = 0;
};

// Computed once per pair of workers; a request then only supplies page numbers.
class KvPlan {
 public:
  // The boxes that `source` owes `target`: the heads that both hold, none where they share none.
  // FailedPrecondition, naming the difference and the remedy, where format, model, block size, head
  // size, layers or total heads differ.
  static absl::StatusOr<KvPlan> make(const KvLayout& source, const KvLayout& target);

  const KvLayout& source() const { return source_; }
  const KvLayout& target() const { return target_; }
  absl::Span<const KvBox> boxes() const { return boxes_; }
  // True when the source holds every head of the target.
  bool complete() const;
  size_t bytes_per_block() const;  // that one block of one layer moves

  // The two sides of the transfer that moves box `box` of the listed blocks of `layer`. The lists
  // are borrowed and of equal length. `cache_offset` is where the cache begins in its region.
  Layout source_layout(const KvBox& box, uint32_t layer, absl::Span<const uint32_t> blocks,
                       uint64_t cache_offset = 0) const;
  Layout target_layout(const KvBox& box, uint32_t layer, absl::Span<const uint32_t> blocks,
                       uint64_t cache_offset = 0) const;

 private:
  KvLayout source_;
  KvLayout target_;
  std::vector<KvBox> boxes_;
};

}  // namespace baton::kvtransfer
