// KV layouts: how a worker lays out its paged KV cache, whoever's engine it is.
//
// A cache holds, for every layer of the model, some *fields* (keys, values, an MLA latent, scales):
// an array [block][token][head][element] with any strides, somewhere in a buffer of the engine's.
// Layers that share a block table are a *group*: most models have one, hybrid models several, some
// of them with a sliding window. A worker of a tensor-parallel group holds heads [first_head,
// first_head + heads) of the model's total_heads; several workers may hold the same head.
//
//   element (layer, block b, token t of it, head h, element e) of a field lies in buffer
//   place.buffer at place.offset + b * block_stride + t * token_stride + (h - first_head) *
//   head_stride
//                + e * element_stride
//
// Kernels for matrix units keep K or V in tiles instead: a row is of several tokens then
// (KvField::row_tokens), in one or more runs of elements. kvtransfer/kv_packing.h finds and says
// such fields.
//
// So NHD and HND, K and V together or apart, one tensor or one per layer, K transposed: all are
// strides and places. Which bytes go where between two layouts is a plan: kvtransfer/kv_plan.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace baton::kvtransfer {

enum class KvRole : uint8_t {
  kOpaque = 1,  // whatever a head of a block holds; KvLayout::format says what
  kKey,
  kValue,
  kLatent,   // MLA: compressed K and V, one for all heads, the same at every rank
  kRopeKey,  // MLA: the rotated part of K, where it lies apart from the latent
  kKeyScale,
  kValueScale,
  kLatentScale,
};
constexpr KvRole kLastKvRole = KvRole::kLatentScale;

enum class KvDtype : uint8_t {
  kByte = 1,
  kInt8,
  kFloat8E4M3,  // 448 is the largest, no infinities
  kFloat8E5M2,
  kFloat16,
  kBfloat16,
  kFloat32,
};
constexpr KvDtype kLastKvDtype = KvDtype::kFloat32;
constexpr uint32_t bytes_of(KvDtype dtype) {
  return dtype >= KvDtype::kFloat32 ? 4 : dtype >= KvDtype::kFloat16 ? 2 : 1;
}
absl::string_view name_of(KvRole role);
absl::string_view name_of(KvDtype dtype);

enum class KvDevice : uint8_t { kHost = 0, kCuda = 1 };

// A range of memory that holds fields: an engine's tensor.
struct KvBuffer {
  uint64_t bytes = 0;
  KvDevice device = KvDevice::kHost;
  uint32_t device_index = 0;
  bool operator==(const KvBuffer&) const = default;
};

// Where one layer of a field begins.
struct KvPlace {
  uint32_t buffer = 0;
  uint64_t offset = 0;
  bool operator==(const KvPlace&) const = default;
};

struct KvField {
  KvRole role = KvRole::kOpaque;
  KvDtype dtype = KvDtype::kByte;
  uint32_t width = 0;         // elements of one token and head; of a block and head if per_block
  bool per_block = false;     // one row for each block, not for each token: scales; opaque heads
  uint64_t block_stride = 0;  // bytes, all of these
  uint64_t token_stride = 0;
  uint64_t head_stride = 0;
  uint64_t element_stride = 0;
  std::vector<KvPlace> places;  // one for each layer of the group

  // For tiles. A row holds row_tokens tokens, which divide block_tokens, and token_stride is from
  // row to row. It lies in `runs` runs of `width` elements, run_stride bytes apart; with more than
  // one there are no gaps in a run. `order`: how tokens and elements lie in a row, in words that
  // must be equal at both ends; of kOpaque, what its bytes are.
  uint32_t row_tokens = 1;
  uint32_t runs = 1;
  uint64_t run_stride = 0;
  std::string order;

  bool is_packed() const { return row_tokens != 1 || runs != 1 || !order.empty(); }
  uint64_t row_bytes() const { return uint64_t{width} * runs * bytes_of(dtype); }
  uint64_t token_bytes() const { return row_bytes() / row_tokens; }
  bool operator==(const KvField&) const = default;
};

// Layers with the same block table.
struct KvGroup {
  std::vector<uint32_t> layers;  // the model's numbers for them, ascending
  uint32_t blocks = 0;
  uint32_t block_tokens = 0;  // tokens in a block
  uint32_t window = 0;        // only the last `window` tokens are kept; 0: all are
  uint32_t total_heads = 0;   // KV heads of the model
  uint32_t first_head = 0;    // this shard's
  uint32_t heads = 0;
  std::vector<KvField> fields;  // each role once

  bool operator==(const KvGroup&) const = default;
};

// What computes the KV. All of it must be equal at both ends: with the KV of another checkpoint of
// the same shape the text would be wrong.
struct KvModel {
  std::string weights;  // a hash over weights and config, or a name that stands for them
  std::string dtype;    // in which it computes K and V, where weights does not say so
  std::string rope;     // likewise: base, scaling, where it is applied
  bool operator==(const KvModel&) const = default;
};

// Counts that engines have at hand, for the layouts below. Bytes and strides follow from them.
struct KvShape {
  uint32_t layers = 0;
  uint32_t blocks = 0;
  uint32_t block_tokens = 0;
  uint32_t total_heads = 0;
  uint32_t first_head = 0;
  uint32_t heads = 0;
  uint32_t head_size = 0;  // elements of K, and of V, for a token and head
  KvDtype dtype = KvDtype::kBfloat16;
};

struct KvLayout {
  std::vector<KvBuffer> buffers;
  std::vector<KvGroup> groups;
  std::string format;  // what roles, types and strides do not say; must be equal at both ends
  KvModel model;

  // One buffer without gaps: [layer][block][head]{head_bytes in `format`}. Blocks of both ends then
  // have to be of one size: no code but their engines can look into a head.
  static KvLayout dense(uint32_t layers, uint32_t blocks, uint32_t block_tokens, uint32_t heads,
                        uint32_t head_bytes, std::string format);

  enum class Order : uint8_t { kNhd, kHnd };  // in a block: [token][head] or [head][token]
  enum class Pair : uint8_t {
    kSplit,    // a tensor for K, one for V
    kStacked,  // one tensor, [K or V][block]...
    kInBlock,  // one tensor, [block][K or V]...
    kJoined,   // one tensor, each row is K and then V
  };
  // The caches of vLLM, SGLang and their like. `tensor_per_layer`: buffer i (or 2 i and 2 i + 1) is
  // layer i's; otherwise one buffer has all layers (kSplit: one has K, one V).
  static KvLayout paged(const KvShape& shape, Order order, Pair pair, bool tensor_per_layer);
  // [block][head]{K: [element][token], V: [token][element]}, one buffer, as Baton's own engine
  // reads.
  static KvLayout transposed_keys(const KvShape& shape);
  // [block][token]{`width` elements}, a buffer for each layer: every rank holds the same.
  static KvLayout latent(uint32_t layers, uint32_t blocks, uint32_t block_tokens, uint32_t width,
                         KvDtype dtype);

  uint32_t layers() const;  // of all groups
  uint64_t bytes() const;   // of all buffers; saturates at UINT64_MAX
  // The buffers' sizes, set to the last byte that a field uses.
  void fit_buffers();
  // InvalidArgument: counts of zero or beyond reason, heads outside the model's, layers or roles
  // named twice, strides with which two elements of a group would overlap, places outside their
  // buffer, sizes that overflow.
  absl::Status check() const;
  // Blocks of a group that hold `tokens` tokens.
  uint64_t blocks_for(uint64_t tokens, size_t group = 0) const {
    const uint64_t size = groups[group].block_tokens;
    return tokens / size + (tokens % size != 0 ? 1 : 0);
  }

  // For messages to a peer. decode() returns only layouts that pass check().
  std::string encode() const;
  static absl::StatusOr<KvLayout> decode(std::string_view bytes);

  bool operator==(const KvLayout&) const = default;

  static constexpr uint32_t kMaxLayers = 4096;  // of all groups, and the largest number of one
  static constexpr size_t kMaxBuffers = 2048;
  static constexpr size_t kMaxGroups = 64;
  static constexpr size_t kMaxFields = 8;  // of a group
  static constexpr size_t kMaxFormat = 128;
  static constexpr size_t kMaxOrder = 128;  // of a field
  static constexpr size_t kMaxModel = 128;  // each text of it
  static constexpr size_t kMaxEncoded = 1 << 20;
};

}  // namespace baton::kvtransfer
