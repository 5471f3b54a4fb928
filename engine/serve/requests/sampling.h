// Choosing the next token: greedy or sampled, the same choice in every process and every batch.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace baton::engine::serve {

struct SamplingParams {
  double temperature = 0.0;  // 0: greedy
  int top_k = 0;             // 0: all tokens
  double top_p = 1.0;        // smallest set of tokens with at least this probability
  uint64_t seed = 0;
  int max_tokens = 16;            // of output; 0: the prompt is computed, no more
  std::vector<std::string> stop;  // output ends before the first of these
  bool ignore_eos = false;        // the end-of-text token is a token like others
  // As vLLM defines them. The penalties are of tokens that are there already: presence and
  // frequency in the output, repetition in the prompt too.
  double min_p = 0;  // only tokens with at least this part of the likeliest one's probability
  double presence_penalty = 0;
  double frequency_penalty = 0;
  double repetition_penalty = 1;
  std::vector<std::pair<int32_t, double>> logit_bias;  // added to these tokens' logits
  std::vector<int32_t> stop_token_ids;                 // end the output, like the end-of-text token
  int min_tokens = 0;                                  // of output, before any token may end it
  int logprobs = -1;             // alternatives to report per token; -1: no log probabilities
  bool prompt_logprobs = false;  // of the prompt's tokens too, as many alternatives

  // InvalidArgument naming the parameter and its range.
  absl::Status validate() const;
  // Whether logits are changed before the choice.
  bool adjusts() const;
};

// What a request means that does not say it: of a checkpoint's generation_config.json, else
// OpenAI's.
struct SamplingDefaults {
  double temperature = 1.0;
  int top_k = 0;
  double top_p = 1.0;
  double min_p = 0;
  double repetition_penalty = 1;
  std::optional<int> max_tokens;

  // InvalidArgument naming the field that is no number or out of its range.
  static absl::StatusOr<SamplingDefaults> parse(std::string_view generation_config);
  void apply(SamplingParams* params) const;
};

// What has been said so far, for penalties and min_tokens.
struct SampleHistory {
  std::span<const int32_t> tokens;      // prompt and output
  size_t prompt_tokens = 0;             // of these
  std::span<const int32_t> end_tokens;  // the model's end-of-text tokens
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
  TokenChoice choose(std::span<const float> logits, const SamplingParams& params, uint64_t position,
                     const SampleHistory& history = {});

  // What a model with these logits thinks of `token`, with `tops` alternatives.
  TokenChoice rate(std::span<const float> logits, int32_t token, int tops);

  // How often the whole vocabulary had to be sorted: where rounding could have decided.
  uint64_t full_sorts() const { return full_sorts_; }

 private:
  void adjust(std::span<const float> logits, const SamplingParams& params,
              const SampleHistory& history);
  int32_t sample(std::span<const float> logits, const SamplingParams& params, uint64_t position);
  std::optional<int32_t> sample_without_sorting(const SamplingParams& params, double uniform);
  int32_t sample_sorted(const SamplingParams& params, double uniform);

  std::vector<std::pair<float, int32_t>> candidates_;
  std::vector<double> weights_;
  std::vector<float> adjusted_;
  std::vector<uint32_t> counts_;  // per token, in the output
  uint64_t full_sorts_ = 0;
};

}  // namespace baton::engine::serve
