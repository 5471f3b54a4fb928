// Greedy and top-k / top-p sampling with a counter-based generator.
#include "engine/serve/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
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
  if (max_tokens < 1) return invalid("max_tokens is ", max_tokens, "; it must be at least 1");
  if (stop.size() > 16) return invalid(stop.size(), " stop strings were given; at most 16 may be");
  for (const std::string& text : stop) {
    if (text.empty() || text.size() > 256) {
      return invalid("a stop string of ", text.size(), " bytes was given; 1 to 256 are allowed");
    }
  }
  if (logprobs < -1 || logprobs > 20) {
    return invalid("logprobs is ", logprobs, "; at most 20 alternatives are reported");
  }
  return absl::OkStatus();
}

double uniform_at(uint64_t seed, uint64_t position) {
  return static_cast<double>(splitmix(splitmix(seed) ^ splitmix(~position)) >> 11) * 0x1p-53;
}

int32_t Sampler::sample(std::span<const float> logits, const SamplingParams& params,
                        uint64_t position) {
  candidates_.clear();
  for (size_t i = 0; i < logits.size(); ++i) {
    if (!std::isnan(logits[i])) candidates_.emplace_back(logits[i], static_cast<int32_t>(i));
  }
  if (candidates_.empty()) return 0;
  size_t kept = candidates_.size();
  if (params.top_k > 0) kept = std::min<size_t>(kept, params.top_k);
  std::partial_sort(candidates_.begin(), candidates_.begin() + kept, candidates_.end(), better);
  candidates_.resize(kept);
  // With an infinite best there are no finite weights to draw by.
  if (!std::isfinite(candidates_[0].first)) return candidates_[0].second;

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
  double left = uniform_at(params.seed, position) * total;
  for (size_t i = 0; i < kept; ++i) {
    if (left < weights_[i]) return candidates_[i].second;
    left -= weights_[i];
  }
  return candidates_[kept - 1].second;
}

TokenChoice Sampler::choose(std::span<const float> logits, const SamplingParams& params,
                            uint64_t position) {
  TokenChoice choice;
  choice.token = params.temperature > 0 ? sample(logits, params, position) : argmax(logits);
  if (params.logprobs < 0) return choice;

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
  const size_t kept = std::min<size_t>(candidates_.size(), params.logprobs);
  std::partial_sort(candidates_.begin(), candidates_.begin() + kept, candidates_.end(), better);
  for (size_t i = 0; i < kept; ++i) {
    choice.top.emplace_back(candidates_[i].second, candidates_[i].first - normalizer);
  }
  return choice;
}

}  // namespace baton::engine::serve
