// How a kernel packs K and V into a block, in words that engines tell each other.
//
// Kernels pack blocks as their processor likes it, and an engine may not know how. Where a number
// lies is a sum of what its head, its token and its element each add. An axis is counted in levels,
// as a number is in digits: [count, stride], the innermost first, strides in numbers. Rows have one
// level, K transposed too; tiles as matrix units read them have two.
//
//   {"block_tokens": 128, "bytes": 65536, "dtype": "bfloat16", "head_size": 64,
//    "heads": 2, "total_heads": 4, "first_head": 2,  of a worker; without: it has all
//    "key":   {"start": 0, "heads": [[2, 16384]], "tokens": [[16, 2], [8, 1024]],
//              "elements": [[2, 1], [32, 32]]},      tiles of 16 tokens and pairs of elements
//    "value": {"start": 8192, ...}}
//
// or, of blocks that no code looks into, which move whole between caches that say the same:
//
//   {"block_tokens": 128, "bytes": 65536, "whole": "fp8, of rank 1 of 2"}
//
// Other keys are passed over. find_packing() makes the first form out of a block that a kernel has
// written; place_packed() makes either a layout, for plans; read_packing() is for converters, which
// look into blocks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvtransfer/agent_kv.h"
#include "kvtransfer/kv_layout.h"

namespace baton::kvtransfer {

// A packing as it is said.
struct KvPacking {
  struct Level {
    uint64_t count = 1;
    uint64_t stride = 0;  // in numbers
    bool operator==(const Level&) const = default;
  };
  using Axis = std::vector<Level>;  // the innermost first; levels of one step are left out
  struct Places {
    uint64_t start = 0;
    Axis tokens, heads, elements;
    bool operator==(const Places&) const = default;
  };
  uint32_t block_tokens = 0;
  uint64_t bytes = 0;                // of a block in a layer
  std::optional<std::string> whole;  // where it is there, nothing below is
  KvDtype dtype = KvDtype::kByte;
  uint32_t heads = 0, total_heads = 0, first_head = 0, head_size = 0;
  Places key, value;
  bool operator==(const KvPacking&) const = default;
};

// InvalidArgument: what is missing, out of range, or would lie outside of its block. Numbers may
// still lie in one place.
absl::StatusOr<KvPacking> read_packing(std::string_view packing);

// What read_packing() reads.
std::string write_packing(const KvPacking& packing);

// Where each step of an axis lies, counted from the first.
std::vector<uint64_t> steps_of(const KvPacking::Axis& axis);

// A layout of one group, of blocks that are packed like this. `group`: its layers, blocks and
// window; the rest is not read. `buffers`: of each layer, from the first byte of its block 0 to the
// last of its last one. `block_stride`: from block to block; 0: without gaps. InvalidArgument: what
// is missing or makes no sense; an axis whose order fits no row of runs.
absl::StatusOr<KvPlacement> place_packed(std::string_view packing, const KvGroup& group,
                                         absl::Span<const Descriptor> buffers,
                                         uint64_t block_stride = 0,
                                         MemoryKind kind = MemoryKind::kDram);

// {"key": ..., "value": ...} of a block in which a kernel has packed numbers. block[i] is what lies
// at its place i: n + 1 for number n of K, -(n + 1) for that of V, 0 for nothing; n counts
// [token][head][element]. InvalidArgument: numbers are missing, or where they lie is no such sum.
absl::StatusOr<std::string> find_packing(absl::Span<const int64_t> block, uint32_t tokens,
                                         uint32_t heads, uint32_t elements);

}  // namespace baton::kvtransfer
