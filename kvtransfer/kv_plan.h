// Plans: which bytes go where between two workers that lay out their KV differently.
//
// A plan is the intersection of two layouts, computed once for a pair of them: boxes of heads,
// tokens and elements that both hold. Tensor-parallel degrees, block sizes and the order of
// dimensions may differ; what is equal at both ends coalesces, up to whole blocks. A request then
// only supplies page numbers, and gets moves: pairs of transport Layouts, of which each is one
// transfer. A move costs no memory, however many pages it has; page lists are borrowed.
//
//   absl::StatusOr<KvPlan> plan = KvPlan::make(prefill_layout, decode_layout);
//   plan->for_each_move(0, {.end = tokens}, {.pages = here}, {.pages = there}, KvPlan::kAllLayers,
//   submit);
//
// Where several workers each hold some of the heads, each has a plan of its own, and
// share_of_rank() tells which heads each of them sends. Values are only moved: layouts of
// different element types are refused.
//
// Plans are values; const calls may come from any thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvtransfer/kv_layout.h"
#include "transport/layout.h"

namespace baton::kvtransfer {

// Heads [first, end) of the model's.
struct KvHeads {
  uint32_t first = 0;
  uint32_t end = UINT32_MAX;
  bool empty() const { return first >= end; }
  bool operator==(const KvHeads&) const = default;
};

// Tokens [begin, end) of a sequence.
struct KvTokens {
  uint64_t begin = 0;
  uint64_t end = 0;
  bool empty() const { return begin >= end; }
  bool operator==(const KvTokens&) const = default;
};

// Where a worker keeps a sequence: pages[i] is the block of its cache that holds the sequence's
// block first_block + i, in blocks of that worker's size.
struct KvPages {
  uint64_t first_block = 0;
  absl::Span<const uint32_t> pages;
};

// The heads that rank `rank` of `ranks` holds. With more ranks than heads, several hold the same.
KvHeads shard_heads(uint32_t total_heads, uint32_t ranks, uint32_t rank);
// Which of the `wanted` heads rank `rank` of `ranks` sends, so that each head is sent by one rank.
// Where several hold the same head, `turn` (a request's number) picks one, so that they alternate.
KvHeads share_of_rank(uint32_t total_heads, uint32_t ranks, uint32_t rank, KvHeads wanted,
                      uint64_t turn);

// Which of the workers that send to one target a source is: of `ranks` with the usual split, number
// `rank`. One rank: it sends all that both hold.
struct KvShare {
  uint32_t ranks = 1;
  uint32_t rank = 0;
  uint64_t turn = 0;
  // Of `wanted` heads of a model's `total_heads`.
  KvHeads heads(uint32_t total_heads, KvHeads wanted) const {
    return ranks <= 1 ? wanted : share_of_rank(total_heads, ranks, rank, wanted, turn);
  }
  bool operator==(const KvShare&) const = default;
};

// The ranks of the source that rank `rank` of `targets` hears, ascending: those that send it heads,
// with its rank as the share's turn; and of those that no rank needs some, so that each rank of the
// source hears when its blocks are free. Empty: there are no such ranks.
std::vector<uint32_t> ranks_heard(uint32_t total_heads, uint32_t sources, uint32_t targets,
                                  uint32_t rank);

// A dimension of a box, below the blocks.
struct KvBoxDim {
  uint64_t count = 1;
  uint64_t source_stride = 0;
  uint64_t target_stride = 0;
  bool operator==(const KvBoxDim&) const = default;
};
using KvBoxDims = absl::InlinedVector<KvBoxDim, 4>;

// Some heads of one field, or of neighbouring fields, for KvPart::unit tokens.
struct KvBox {
  uint32_t source_field = 0;  // the offsets count from the place of this field
  uint32_t target_field = 0;
  uint64_t source_offset = 0;
  uint64_t target_offset = 0;
  uint64_t source_unit_stride = 0;  // from one unit of a block to the next
  uint64_t target_unit_stride = 0;
  uint64_t piece_bytes = 0;       // contiguous at both ends
  uint64_t bytes_per_token = 0;   // all heads; for a row per block: that row's, as if of each token
  KvBoxDims dims;                 // outermost first, at most 3
  bool same_layer_steps = false;  // layers follow each other at equal distances, at both ends
};

// The layers that a group of the source and a group of the target have in common.
struct KvPart {
  struct Layer {
    uint32_t layer = 0;         // the model's number
    uint32_t source_index = 0;  // of it in its group
    uint32_t target_index = 0;
  };
  uint32_t source_group = 0;
  uint32_t target_group = 0;
  uint32_t unit = 0;  // tokens: the largest number that divides both block sizes
  uint32_t window = 0;
  KvHeads heads;  // that move
  std::vector<Layer> layers;
  std::vector<KvBox> boxes;

  // Of `tokens`, those that are kept when the sequence has `length`: all, or the last of the
  // window.
  KvTokens kept(KvTokens tokens, uint64_t length) const;
  // Bytes of one token and layer that move: equal at both ends, whatever the blocks' sizes.
  uint64_t bytes_per_token() const;
};

// One transfer. The layouts count from the beginning of the two buffers.
struct KvMove {
  uint32_t source_buffer = 0;
  uint32_t target_buffer = 0;
  Layout source;
  Layout target;
  uint32_t first_layer = 0;  // indices into KvPart::layers: layers [first_layer, + layers)
  uint32_t layers = 0;
  KvTokens tokens;             // of the range asked for
  uint64_t counted_bytes = 0;  // tokens x layers x the box's bytes_per_token: of all moves of a
                               // range, the sum is the same however it is cut
};

class KvPlan {
 public:
  static constexpr KvTokens kAllLayers{0, std::numeric_limits<uint64_t>::max()};

  // What `source` owes `target`: layers and heads (of its share) that both hold, none where they
  // share none. FailedPrecondition, naming the difference and the remedy, where model, format,
  // fields, element types or the model's heads differ, where the source keeps less of a window
  // than the target needs, or where blocks that only their engines can cut differ in size.
  static absl::StatusOr<KvPlan> make(const KvLayout& source, const KvLayout& target,
                                     const KvShare& share = {});

  const KvLayout& source() const { return source_; }
  const KvLayout& target() const { return target_; }
  absl::Span<const KvPart> parts() const { return parts_; }
  // The part that has a layer of the model, and the layer's index in it; null: none.
  const KvPart* find_layer(uint32_t layer, uint32_t* index) const;
  // True when the source holds every layer of the target, and every head of its share.
  bool complete() const;

  // Calls `sink` for every transfer that moves `tokens` of layers [layers.begin, layers.end) of a
  // part (indices into KvPart::layers). The range is rounded outwards to units, which stays inside
  // the first and the last block of both: where block sizes are equal, whole blocks move. Moves
  // come per box; layers are one move where their distances allow. Stops at the first error, and
  // returns it. InvalidArgument: pages that do not hold the tokens, or are not in their cache.
  absl::Status for_each_move(size_t part, KvTokens tokens, const KvPages& source,
                             const KvPages& target, KvTokens layers,
                             absl::FunctionRef<absl::Status(const KvMove&)> sink) const;

 private:
  struct Segment;
  absl::Status emit(const KvPart& part, const KvBox& box, const Segment& segment, KvTokens layers,
                    absl::FunctionRef<absl::Status(const KvMove&)> sink) const;

  KvLayout source_;
  KvLayout target_;
  KvShare share_;
  std::vector<KvPart> parts_;
};

}  // namespace baton::kvtransfer
