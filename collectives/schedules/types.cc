// Names and sizes of the words of collectives.
#include "collectives/types.h"

#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "transport/base/nearest_name.h"

namespace baton {
namespace {

constexpr std::string_view kCollectiveNames[kCollectives] = {
    "all_reduce", "reduce_scatter", "all_gather",   "broadcast", "reduce",
    "all_to_all", "barrier",        "send_receive", "gather",    "scatter"};
constexpr std::string_view kReduceOpNames[kReduceOps] = {"sum",       "prod", "min", "max", "avg",
                                                         "premulsum", "and",  "or",  "xor"};
constexpr std::string_view kAlgorithmNames[kAlgorithms] = {
    "ring", "recursive_doubling", "halving_doubling", "tree", "direct", "hierarchical"};

struct TypeNames {
  std::string_view ours, theirs;  // theirs: nccl-tests'
};
constexpr TypeNames kTypes[kDataTypes] = {
    {"f32", "float"},       {"f16", "half"},        {"bf16", "bfloat16"}, {"f64", "double"},
    {"i8", "int8"},         {"u8", "uint8"},        {"i32", "int32"},     {"i64", "int64"},
    {"f8e4m3", "fp8_e4m3"}, {"f8e5m2", "fp8_e5m2"}, {"u32", "uint32"},    {"u64", "uint64"},
    {"bool", "bool"}};

template <size_t N>
std::string_view name_at(const std::string_view (&names)[N], size_t index) {
  return index < N ? names[index] : "unknown";
}

template <typename T, size_t N>
absl::StatusOr<T> parse(const std::string_view (&names)[N], std::string_view name,
                        std::string_view what) {
  for (size_t i = 0; i < N; ++i) {
    if (names[i] == name) return static_cast<T>(i);
  }
  const std::vector<std::string> known(std::begin(names), std::end(names));
  return absl::InvalidArgumentError(
      absl::StrFormat("unknown %s '%s'%s (use one of %s)", std::string(what), std::string(name),
                      base::did_you_mean(name, known), absl::StrJoin(known, ", ")));
}

}  // namespace

std::string_view name_of(Collective collective) {
  return name_at(kCollectiveNames, static_cast<size_t>(collective));
}
std::string_view name_of(DataType type) {
  const auto index = static_cast<size_t>(type);
  return index < kDataTypes ? kTypes[index].ours : "unknown";
}
std::string_view name_of(ReduceOp op) { return name_at(kReduceOpNames, static_cast<size_t>(op)); }
std::string_view name_of(Algorithm algorithm) {
  return name_at(kAlgorithmNames, static_cast<size_t>(algorithm));
}

absl::StatusOr<DataType> parse_data_type(std::string_view name) {
  std::vector<std::string> known, lines;
  for (size_t i = 0; i < kDataTypes; ++i) {
    const auto& [ours, theirs] = kTypes[i];
    if (name == ours || name == theirs) return static_cast<DataType>(i);
    known.insert(known.end(), {std::string(theirs), std::string(ours)});
    lines.push_back(absl::StrCat(std::string(ours), " (", std::string(theirs), ")"));
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("unknown data type '%s'%s (use one of %s)", std::string(name),
                      base::did_you_mean(name, known), absl::StrJoin(lines, ", ")));
}

absl::StatusOr<ReduceOp> parse_reduce_op(std::string_view name) {
  if (name == "mulsum") return ReduceOp::kPreMulSum;  // nccl-tests'
  return parse<ReduceOp>(kReduceOpNames, name, "reduction");
}
absl::StatusOr<Algorithm> parse_algorithm(std::string_view name) {
  return parse<Algorithm>(kAlgorithmNames, name, "algorithm");
}

}  // namespace baton
