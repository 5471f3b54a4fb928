// Greedy and top-k / top-p sampling with a counter-based generator.
#include "engine/serve/requests/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "engine/files/json_fields.h"
#include "transport/base/splitmix.h"

namespace baton::engine::serve {
namespace {

bool better(const std::pair<float, int32_t>& a, const std::pair<float, int32_t>& b) {
  return a.first > b.first || (a.first == b.first && a.second < b.second);
}

int32_t argmax(std::span<const float> logits) {
  int32_t best = 0;
  float value = -std::numeric_limits<float>::infinity();
  for (size_t i = 0; i < logits.size(); ++i) {
    if (logits[i] > value) {
      value = logits[i];
      best = static_cast<int32_t>(i);
    }
  }
  return best;
}

}  // namespace

absl::Status SamplingParams::validate() const {
  const auto invalid = [](auto&&... parts) {
    return absl::InvalidArgumentError(absl::StrCat(parts...));
  };
  if (!(temperature >= 0 && temperature <= 100)) {
    return invalid("temperature is ", temperature, "; it must be between 0 and 100");
  }
  if (top_k < 0) return invalid("top_k is ", top_k, "; it must be 0 (all) or positive");
  if (!(top_p > 0 && top_p <= 1)) {
    return invalid("top_p is ", top_p, "; it must be above 0 and at most 1");
  }
  if (max_tokens < 0) return invalid("max_tokens is ", max_tokens, "; it must not be negative");
  if (stop.size() > 16) return invalid(stop.size(), " stop strings were given; at most 16 may be");
  for (const std::string& text : stop) {
    if (text.empty() || text.size() > 256) {
      return invalid("a stop string of ", text.size(), " bytes was given; 1 to 256 are allowed");
    }
  }
  if (!(min_p >= 0 && min_p <= 1)) return invalid("min_p is ", min_p, "; it must be in [0, 1]");
  for (const double penalty : {presence_penalty, frequency_penalty}) {
    if (!(penalty >= -2 && penalty <= 2)) {
      return invalid("a presence_penalty or frequency_penalty is ", penalty,
                     "; it must be between -2 and 2");
    }
  }
  if (!(repetition_penalty > 0 && repetition_penalty <= 100)) {
    return invalid("repetition_penalty is ", repetition_penalty,
                   "; it must be above 0 and at most 100");
  }
  if (logit_bias.size() > 1024 || stop_token_ids.size() > 1024) {
    return invalid("logit_bias and stop_token_ids have at most 1024 entries each");
  }
  for (const auto& [token, bias] : logit_bias) {
    if (token < 0 || !(bias >= -100 && bias <= 100)) {
      return invalid("logit_bias has ", bias, " for token ", token,
                     "; it must be between -100 and 100, for a token's id");
    }
  }
  if (min_tokens < 0 || min_tokens > max_tokens) {
    return invalid("min_tokens is ", min_tokens, "; it must be between 0 and max_tokens");
  }
  if (min_tokens > 0 && !stop.empty()) {
    return invalid("min_tokens together with stop strings is not supported here");
  }
  if (prompt_logprobs && logprobs < 0) return invalid("prompt_logprobs needs logprobs");
  if (logprobs < -1 || logprobs > 20) {
    return invalid("logprobs is ", logprobs, "; at most 20 alternatives are reported");
  }
  return absl::OkStatus();
}

double uniform_at(uint64_t seed, uint64_t position) {
  return static_cast<double>(base::splitmix(base::splitmix(seed) ^ base::splitmix(~position)) >>
                             11) *
         0x1p-53;
}

bool SamplingParams::adjusts() const {
  return presence_penalty != 0 || frequency_penalty != 0 || repetition_penalty != 1 ||
         !logit_bias.empty() || min_tokens > 0;
}

// adjusted_ = logits with penalties, biases, and tokens that may not come yet at -infinity.
void Sampler::adjust(std::span<const float> logits, const SamplingParams& params,
                     const SampleHistory& history) {
  adjusted_.assign(logits.begin(), logits.end());
  const size_t prompt = std::min(history.prompt_tokens, history.tokens.size());
  counts_.assign(logits.size(), 0);
  if (params.repetition_penalty != 1) {
    for (const int32_t token : history.tokens) {
      uint32_t& seen = counts_[static_cast<size_t>(token)];
      if (seen++ > 0) continue;
      float& logit = adjusted_[static_cast<size_t>(token)];
      const auto penalty = static_cast<float>(params.repetition_penalty);
      logit = logit > 0 ? logit / penalty : logit * penalty;
    }
    counts_.assign(logits.size(), 0);
  }
  for (const int32_t token : history.tokens.subspan(prompt)) ++counts_[static_cast<size_t>(token)];
  if (params.presence_penalty != 0 || params.frequency_penalty != 0) {
    for (size_t token = 0; token < counts_.size(); ++token) {
      if (counts_[token] == 0) continue;
      adjusted_[token] -=
          static_cast<float>(params.presence_penalty + params.frequency_penalty * counts_[token]);
    }
  }
  for (const auto& [token, bias] : params.logit_bias) {
    adjusted_[static_cast<size_t>(token)] += static_cast<float>(bias);
  }
  if (history.tokens.size() - prompt < static_cast<size_t>(params.min_tokens)) {
    for (const auto& list : {history.end_tokens, std::span<const int32_t>(params.stop_token_ids)}) {
      for (const int32_t token : list) {
        if (static_cast<size_t>(token) < adjusted_.size()) {
          adjusted_[static_cast<size_t>(token)] = -std::numeric_limits<float>::infinity();
        }
      }
    }
  }
}

int32_t Sampler::sample(std::span<const float> logits, const SamplingParams& params,
                        uint64_t position) {
  candidates_.clear();
  for (size_t i = 0; i < logits.size(); ++i) {
    if (!std::isnan(logits[i])) candidates_.emplace_back(logits[i], static_cast<int32_t>(i));
  }
  if (candidates_.empty()) return 0;
  const auto best = *std::min_element(candidates_.begin(), candidates_.end(), better);
  // With an infinite best there are no finite weights to draw by.
  if (!std::isfinite(best.first)) return best.second;
  if (params.min_p > 0) {
    std::erase_if(candidates_, [&](const auto& candidate) {
      return std::exp((static_cast<double>(candidate.first) - best.first) / params.temperature) <
             params.min_p;
    });
  }
  const double uniform = uniform_at(params.seed, position);
  const bool all = params.top_k == 0 || static_cast<size_t>(params.top_k) >= candidates_.size();
  if (all) {
    if (const auto token = sample_without_sorting(params, uniform); token.has_value())
      return *token;
    ++full_sorts_;
  }
  return sample_sorted(params, uniform);
}

// The token that sample_sorted() would choose, found among the likeliest few: only the sum of all
// weights is taken in another order. Where that could make a difference: nothing.
std::optional<int32_t> Sampler::sample_without_sorting(const SamplingParams& params,
                                                       double uniform) {
  const size_t all = candidates_.size();
  const float best = std::min_element(candidates_.begin(), candidates_.end(), better)->first;
  const auto weight = [&](size_t i) {
    return std::exp((static_cast<double>(candidates_[i].first) - best) / params.temperature);
  };
  double total = 0;
  for (size_t i = 0; i < all; ++i) total += weight(i);
  // A sum of n positive numbers is off by n units in the last place at most, in any order.
  const double slack = total * static_cast<double>(all + 16) * 8 * 0x1p-53;
  for (size_t few = 64;; few *= 8) {
    const size_t kept = std::min(few, all);
    const auto end = candidates_.begin() + static_cast<ptrdiff_t>(kept);
    if (kept < all) std::nth_element(candidates_.begin(), end, candidates_.end(), better);
    std::sort(candidates_.begin(), end, better);
    size_t cut = kept;
    double left = uniform * total;
    double doubt = slack;
    if (params.top_p < 1) {
      double sum = 0;
      for (cut = 0; cut < kept && sum < params.top_p * total; ++cut) {
        if (std::abs(sum - params.top_p * total) <= slack) return std::nullopt;
        sum += weight(cut);
      }
      if (std::abs(sum - params.top_p * total) <= slack) return std::nullopt;
      if (sum < params.top_p * total) {  // the cut is behind these
        if (kept == all) return std::nullopt;
        continue;
      }
      left = uniform * sum;  // the very sum of the sorted list
      doubt = 0;
    }
    for (size_t i = 0; i < cut; ++i) {
      const double here = weight(i);
      if (doubt > 0 && std::abs(left - here) <= doubt) return std::nullopt;
      if (left < here) return candidates_[i].second;
      left -= here;
    }
    if (doubt == 0) return candidates_[cut - 1].second;
    if (kept == all) return std::nullopt;
  }
}

int32_t Sampler::sample_sorted(const SamplingParams& params, double uniform) {
  size_t kept = candidates_.size();
  if (params.top_k > 0) kept = std::min<size_t>(kept, params.top_k);
  std::partial_sort(candidates_.begin(), candidates_.begin() + kept, candidates_.end(), better);
  candidates_.resize(kept);
  // Sums run over the sorted list: the same order, hence the same bits, everywhere.
  weights_.clear();
  double total = 0;
  for (const auto& [logit, token] : candidates_) {
    weights_.push_back(
        std::exp((static_cast<double>(logit) - candidates_[0].first) / params.temperature));
    total += weights_.back();
  }
  if (params.top_p < 1) {
    double sum = 0;
    kept = 0;
    while (kept < weights_.size() && sum < params.top_p * total) sum += weights_[kept++];
    total = sum;
  }
  double left = uniform * total;
  for (size_t i = 0; i < kept; ++i) {
    if (left < weights_[i]) return candidates_[i].second;
    left -= weights_[i];
  }
  return candidates_[kept - 1].second;
}

TokenChoice Sampler::choose(std::span<const float> logits, const SamplingParams& params,
                            uint64_t position, const SampleHistory& history) {
  TokenChoice choice;
  std::span<const float> drawn = logits;
  if (params.adjusts()) {
    adjust(logits, params, history);
    drawn = adjusted_;
  }
  choice.token = params.temperature > 0 ? sample(drawn, params, position) : argmax(drawn);
  if (params.logprobs < 0) return choice;
  return rate(logits, choice.token, params.logprobs);
}

TokenChoice Sampler::rate(std::span<const float> logits, int32_t token, int tops) {
  TokenChoice choice{.token = token, .logprob = 0, .top = {}};
  const float best = logits[argmax(logits)];
  double total = 0;
  for (float logit : logits) {
    if (!std::isnan(logit)) total += std::exp(static_cast<double>(logit) - best);
  }
  const double normalizer = best + std::log(total);
  choice.logprob = logits[choice.token] - normalizer;
  candidates_.clear();
  for (size_t i = 0; i < logits.size(); ++i) {
    if (!std::isnan(logits[i])) candidates_.emplace_back(logits[i], static_cast<int32_t>(i));
  }
  const size_t kept = std::min<size_t>(candidates_.size(), tops);
  std::partial_sort(candidates_.begin(), candidates_.begin() + kept, candidates_.end(), better);
  for (size_t i = 0; i < kept; ++i) {
    choice.top.emplace_back(candidates_[i].second, candidates_[i].first - normalizer);
  }
  return choice;
}

absl::StatusOr<SamplingDefaults> SamplingDefaults::parse(std::string_view generation_config) {
  const auto json = parse_json(generation_config, "generation_config.json");
  if (!json.ok()) return json.status();
  SamplingDefaults defaults;
  absl::Status status;
  const auto number = [&](const char* key, double low, double high, double* out) {
    const absl::StatusOr<double> value = number_field(*json, key, low, high, *out);
    status.Update(value.status());
    if (value.ok()) *out = *value;
  };
  number("temperature", 0, 100, &defaults.temperature);
  number("top_p", 0, 1, &defaults.top_p);
  number("min_p", 0, 1, &defaults.min_p);
  number("repetition_penalty", 0, 100, &defaults.repetition_penalty);
  const absl::StatusOr<int64_t> top_k = int_field(*json, "top_k", -1, INT32_MAX, 0);
  status.Update(top_k.status());
  if (top_k.ok() && *top_k > 0) defaults.top_k = static_cast<int>(*top_k);
  const absl::StatusOr<int64_t> limit = int_field(*json, "max_new_tokens", 1, INT32_MAX, 0);
  status.Update(limit.status());
  if (limit.ok() && *limit > 0) defaults.max_tokens = static_cast<int>(*limit);
  SamplingParams params;
  defaults.apply(&params);
  status.Update(params.validate());
  if (status.ok()) return defaults;
  return absl::InvalidArgumentError(absl::StrCat("generation_config.json: ", status.message()));
}

void SamplingDefaults::apply(SamplingParams* params) const {
  params->temperature = temperature;
  params->top_k = top_k;
  params->top_p = top_p;
  params->min_p = min_p;
  params->repetition_penalty = repetition_penalty;
  if (max_tokens.has_value()) params->max_tokens = *max_tokens;
}

}  // namespace baton::engine::serve
