// What a server is asked, and when: the datasets of `vllm bench serve` by their names there, and
// traces in Mooncake's format. The same options and words give the same requests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
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
  double per_byte = 0.25;  // tokens in a byte of text
};

struct WorkloadOptions {
  std::string dataset = "text";
  std::string file;
  size_t requests = 100;
  uint64_t seed = 1;
  int output = 0;  // tokens of every answer; 0: as the dataset has it, else kOutput

  size_t text_bytes = 1000;  // text: passages of the demo's prompts
  size_t input = 1024;       // random: tokens behind the prefix, and how far lengths are from this
  double range = 0;          // and from the output's: within [x (1 - range), x (1 + range)]
  size_t prefix = 0;         // random: tokens that all prompts begin with
  size_t prefixes = 10;      // prefix_repetition: so many beginnings
  size_t prefix_tokens = 256;
  size_t suffix_tokens = 256;
  double trace_scale = 1;  // mooncake: of all lengths
  double trace_speed = 1;  // mooncake: of the clock

  static constexpr int kOutput = 64;
};

// The names of datasets, and what one of them needs.
struct Needs {
  bool words = false;
  bool file = false;
};
std::vector<std::string> dataset_names();
Needs needs_of(const WorkloadOptions& options);

// Who may ask only with text: requests of tokens become such by the server's /detokenize.
//   text               passages of `text_bytes`
//   random             `input` random tokens
//   prefix_repetition  one of `prefixes` beginnings, then `suffix_tokens` that no other prompt has
//   sharegpt           the first turn of each conversation of a file in ShareGPT's format, as long
//   an answer; without
//                      a file random tokens, in lengths that are spread as its are
//   custom             lines of a file: {"prompt": TEXT}, with "output_tokens" if it likes
//   mooncake           lines of a file: {"timestamp": ms, "input_length": n, "output_length": n,
//   "hash_ids": [...]}, a hash
//                      for each 512 tokens: prompts with equal hashes begin alike
// InvalidArgument naming the file's line that is wrong; NotFound where there is nothing to ask.
absl::StatusOr<std::vector<LoadRequest>> make_workload(const WorkloadOptions& options,
                                                       const Words& words);

// When `count` requests are sent: `rate` per second on average, gaps gamma-distributed with this
// shape (1: a Poisson process; smaller: in bursts; larger: evenly). All are sent within count /
// rate seconds.
std::vector<Time> arrivals(size_t count, double rate, double burstiness, uint64_t seed);

// Internal to engine/load: datasets that are files.
void append_random(size_t count, const Words& words, std::mt19937_64& random,
                   std::vector<int32_t>& to);

absl::StatusOr<std::vector<LoadRequest>> read_prompts(const WorkloadOptions& options);
absl::StatusOr<std::vector<LoadRequest>> read_sharegpt(const WorkloadOptions& options,
                                                       const Words& words);
absl::StatusOr<std::vector<LoadRequest>> read_mooncake_trace(const WorkloadOptions& options,
                                                             const Words& words);

}  // namespace baton::engine::load
