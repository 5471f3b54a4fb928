// The requests to a server and their times: texts, random tokens, or a trace in Mooncake's format.
// Equal options and words give equal requests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/clock.h"

namespace baton::engine::load {

struct LoadRequest {
  Time at{};                    // after the load's beginning, where the dataset says when
  std::vector<int32_t> tokens;  // the prompt, or, where this is empty,
  std::string text;             // its text
  int output = 1;               // tokens wanted
};

// Tokens that the server knows: prompts of given lengths are made of them.
struct Words {
  std::vector<int32_t> tokens;
};

struct WorkloadOptions {
  std::string dataset = "text";
  std::string file;  // mooncake: the trace
  size_t requests = 100;
  uint64_t seed = 1;
  int output = 0;  // tokens of every answer; 0: as the dataset has it, else kOutput

  size_t text_bytes = 1000;  // text: passages of the demo's prompts
  size_t input = 1024;       // random: tokens
  double trace_scale = 1;    // mooncake: of all lengths
  double trace_speed = 1;    // mooncake: of the clock

  static constexpr int kOutput = 64;
};

// The names of datasets, and what one of them needs.
struct Needs {
  bool words = false;
  bool file = false;
};
std::vector<std::string> dataset_names();
Needs needs_of(const WorkloadOptions& options);

//   text      passages of `text_bytes`
//   random    `input` random tokens
//   mooncake  lines of a file: {"timestamp": ms, "input_length": n, "output_length": n,
//             "hash_ids": [...]}, a hash for each 512 tokens: prompts with equal hashes begin alike
// InvalidArgument naming the file's line that is wrong; NotFound where there is nothing to ask.
absl::StatusOr<std::vector<LoadRequest>> make_workload(const WorkloadOptions& options,
                                                       const Words& words);

// When `count` requests are sent: a Poisson process of `rate` per second. All are sent within count
// / rate seconds.
std::vector<Time> arrivals(size_t count, double rate, uint64_t seed);

}  // namespace baton::engine::load
