// Choosing the next token: greedy or sampled, the same choice in every process and every batch.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"

namespace baton::engine::serve {

struct SamplingParams {
  double temperature = 0.0;  // 0: greedy
  int top_k = 0;             // 0: all tokens
  double top_p = 1.0;        // smallest set of tokens with at least this probability
  uint64_t seed = 0;
  int max_tokens = 16;            // of output
  std::vector<std::string> stop;  // output ends before the first of these
  bool ignore_eos = false;        // the end-of-text token is a token like others
  int logprobs = -1;              // alternatives to report per token; -1: no log probabilities

  // InvalidArgument naming the parameter and its range.
  absl::Status validate() const;
};

// A number in [0, 1) for a (seed, position): a counter-based generator (splitmix64, Steele et al.
// 2014, applied twice), so that no state travels with a request.
double uniform_at(uint64_t seed, uint64_t position);

struct TokenChoice {
  int32_t token = 0;
  double logprob = 0;                           // of `token`, before temperature and cuts
  std::vector<std::pair<int32_t, double>> top;  // the likeliest, best first
};

// Keeps scratch memory between calls. Not thread-safe.
class Sampler {
 public:
  // `position` counts tokens from the start of the sequence: that of the token being chosen. Ties
  // go to the lower id. NaN logits are never chosen.
  TokenChoice choose(std::span<const float> logits, const SamplingParams& params,
                     uint64_t position);

 private:
  int32_t sample(std::span<const float> logits, const SamplingParams& params, uint64_t position);

  std::vector<std::pair<float, int32_t>> candidates_;
  std::vector<double> weights_;
};

}  // namespace baton::engine::serve
