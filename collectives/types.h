// The enumerations of collectives: which collective, over which elements, combined how, by which
// algorithm. Names are those of nccl-tests, where it has one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "absl/status/statusor.h"

namespace baton {

enum class Collective : uint8_t {
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kReduce,
  kAllToAll,
  kBarrier,
  kSendReceive,  // one rank to another: `root` sends, `peer` receives
  kGather,       // `root` gets a block from each rank
  kScatter,      // each rank gets a block from `root`
};
inline constexpr int kCollectives = 10;

enum class DataType : uint8_t {
  kF32,
  kF16,
  kBF16,
  kF64,
  kI8,
  kU8,
  kI32,
  kI64,
  // 8-bit floats (OCP revision 1.0). What is too large becomes the largest (448, 57344). E4M3 has
  // no infinities: they become NaN.
  kF8E4M3,
  kF8E5M2,
  kU32,
  kU64,
  kBool,  // a byte; any but 0 counts as true, and what is combined is 0 or 1
};
inline constexpr int kDataTypes = 13;

enum class ReduceOp : uint8_t {
  kSum,
  kProd,
  kMin,  // of floats: NaN if any is NaN, like kMax
  kMax,
  kAvg,  // the sum divided by the number of ranks, once, at the end; integers round towards zero
  // The sum of each rank's input times a factor of its own (CallOptions::factor). Products are
  // rounded to the type before they are added.
  kPreMulSum,
  kAnd,  // these three: of bits
  kOr,
  kXor,
};
inline constexpr int kReduceOps = 9;

enum class Algorithm : uint8_t {
  kRing,               // neighbours only, bandwidth-optimal, latency grows with n
  kRecursiveDoubling,  // log2 n rounds, whole vectors: small messages
  kHalvingDoubling,    // Rabenseifner: log2 n rounds, bandwidth-optimal, any rank count
  kTree,               // double binary tree: log2 n, pipelined
  kDirect,             // each rank with every other: one round
  kHierarchical,       // inside a node, between nodes, inside a node
};
inline constexpr int kAlgorithms = 6;

// Bytes of an element; 0 of what is no type.
constexpr size_t size_of(DataType type) {
  constexpr size_t kSizeOfType[kDataTypes] = {4, 2, 2, 8, 1, 1, 4, 8, 1, 1, 4, 8, 1};
  const auto index = static_cast<size_t>(type);
  return index < kDataTypes ? kSizeOfType[index] : 0;
}

constexpr bool is_float(DataType type) {
  return type <= DataType::kF64 || type == DataType::kF8E4M3 || type == DataType::kF8E5M2;
}

// True if elements of the type can be combined by this operation. Floats have no bitwise
// operations. Truth values have no average and no factor (their sum is `or`, their product `and`).
constexpr bool combines(DataType type, ReduceOp op) {
  if (type == DataType::kBool) return op != ReduceOp::kAvg && op != ReduceOp::kPreMulSum;
  return op < ReduceOp::kAnd || !is_float(type);
}

// "all_reduce", "f32", "sum", "ring": for people, flags and JSON.
std::string_view name_of(Collective collective);
std::string_view name_of(DataType type);
std::string_view name_of(ReduceOp op);
std::string_view name_of(Algorithm algorithm);
// nccl-tests' names too ("float", "half", "int8", ..., "mulsum"). InvalidArgument lists them all.
absl::StatusOr<DataType> parse_data_type(std::string_view name);
absl::StatusOr<ReduceOp> parse_reduce_op(std::string_view name);
absl::StatusOr<Algorithm> parse_algorithm(std::string_view name);

}  // namespace baton
