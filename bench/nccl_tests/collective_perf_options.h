// The options of `baton all_reduce_perf` and the other collective benchmarks: nccl-tests' flags,
// and Baton's own.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "bench/nccl_tests/measured.h"
#include "collectives/communicator.h"
#include "transport/settings.h"

namespace baton::bench {

// How the ranks' times become one: nccl-tests' -a.
enum class Average : uint8_t { kRank0, kMean, kMin, kMax };

struct CollectivePerfOptions {
  std::string command;  // "all_reduce_perf"
  Measured collective = Measured::kAllReduce;

  // nccl-tests'
  size_t min_bytes = 32 << 20;
  size_t max_bytes = 32 << 20;
  size_t step_bytes = 1 << 20;
  size_t step_factor = 1;  // 1: step_bytes instead
  int iterations = 20;
  int aggregated = 1;  // calls in flight together
  int warmup = 1;
  int cycles = 1;  // 0: for ever
  int checks = 1;
  std::vector<DataType> types = {DataType::kF32};
  std::vector<ReduceOp> ops = {ReduceOp::kSum};
  int root = 0;  // kEveryRoot: all ranks in turn
  static constexpr int kEveryRoot = -1;
  int blocking = 0;
  Average average = Average::kMean;
  bool cpu_time = false;
  bool timestamps = false;
  bool per_iteration = false;
  int per_iteration_skip = 0;
  size_t unalign = 0;     // elements
  std::string nccl_json;  // -J
  double timeout_s = 60;  // of each call

  // Ours
  // From --ranks, or -t times -g. 0: what a launcher started, or 2.
  int ranks = 0;
  bool one_each = false;  // -t 1 -g 1: of each process that a launcher started, or of this one
  std::string provider;
  SettingValues settings;
  std::string link;
  CallOptions call;
  bool plain_memory = false;
  bool window = false;      // of send and receive: a put with a signal instead
  std::optional<int> cuda;  // memory of this CUDA device
  bool explain = false;
  bool baselines = false;
  bool pin = true;
  std::string json;

  bool reduces() const;  // combines, so that the operation matters
  bool has_root() const;
  // A rank's result may take the place of its input.
  bool can_be_in_place() const;
};

// The arguments of one run, or how to exit instead (0: help was printed).
struct CollectivePerfCommand {
  std::optional<CollectivePerfOptions> options;
  int exit_status = 0;
};
// argv[0] is the command's name, which says what is measured.
CollectivePerfCommand parse_collective_perf(int argc, const char* const* argv);

}  // namespace baton::bench
