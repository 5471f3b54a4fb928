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
};
inline constexpr int kCollectives = 8;

enum class DataType : uint8_t { kF32, kF16, kBF16, kF64, kI8, kU8, kI32, kI64 };
inline constexpr int kDataTypes = 8;

enum class ReduceOp : uint8_t {
  kSum,
  kProd,
  kMin,  // of floats: NaN if any is NaN, like kMax
  kMax,
  kAvg,  // the sum divided by the number of ranks, once, at the end; integers round towards zero
};
inline constexpr int kReduceOps = 5;

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
  constexpr size_t kSizeOfType[kDataTypes] = {4, 2, 2, 8, 1, 1, 4, 8};
  const auto index = static_cast<size_t>(type);
  return index < kDataTypes ? kSizeOfType[index] : 0;
}

// "all_reduce", "f32", "sum", "ring": for people, flags and JSON.
std::string_view name_of(Collective collective);
std::string_view name_of(DataType type);
std::string_view name_of(ReduceOp op);
std::string_view name_of(Algorithm algorithm);
// nccl-tests' names too ("float", "half", "bfloat16", "int8", ...). InvalidArgument lists them all.
absl::StatusOr<DataType> parse_data_type(std::string_view name);
absl::StatusOr<ReduceOp> parse_reduce_op(std::string_view name);
absl::StatusOr<Algorithm> parse_algorithm(std::string_view name);

}  // namespace baton
