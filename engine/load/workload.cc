// Makes requests of random tokens or of the demo's texts, and the moments at which they are sent.
#include "engine/load/workload.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "engine/demo/demo.h"

namespace baton::engine::load {
namespace {

struct Dataset {
  const char* name;
  Needs needs;
};
constexpr std::array kDatasets = {
    Dataset{"text", Needs{}},
    Dataset{"random", Needs{.words = true}},
    Dataset{"prefix_repetition", Needs{.words = true}},
    Dataset{"sharegpt", Needs{.words = true}},
    Dataset{"custom", Needs{.file = true}},
    Dataset{"mooncake", Needs{.words = true, .file = true}},
};

using Requests = std::vector<LoadRequest>;

int output_of(const WorkloadOptions& options) {
  return options.output > 0 ? options.output : WorkloadOptions::kOutput;
}

// Passages of the demo's texts, cut at random places.
Requests passages(const WorkloadOptions& options) {
  const std::string_view text = demo::kDemoPrompts;
  std::mt19937_64 random(options.seed);
  Requests out(options.requests);
  for (LoadRequest& request : out) {
    request.output = output_of(options);
    size_t from = random() % text.size();
    while (request.text.size() < options.text_bytes) {
      request.text += text.substr(from, options.text_bytes - request.text.size());
      from = 0;
    }
  }
  return out;
}

// A random length around `middle`.
size_t length_near(size_t middle, double range, std::mt19937_64& random) {
  const auto low = static_cast<size_t>(std::floor(static_cast<double>(middle) * (1 - range)));
  const auto high = static_cast<size_t>(std::ceil(static_cast<double>(middle) * (1 + range)));
  return std::max<size_t>(1, low + random() % (high - low + 1));
}

Requests random_tokens(const WorkloadOptions& options, const Words& words) {
  std::mt19937_64 random(options.seed);
  std::vector<int32_t> prefix;
  append_random(options.prefix, words, random, prefix);
  Requests out(options.requests);
  for (LoadRequest& request : out) {
    const size_t input = length_near(options.input, options.range, random);
    request.output = static_cast<int>(
        length_near(static_cast<size_t>(output_of(options)), options.range, random));
    request.tokens = prefix;
    append_random(input, words, random, request.tokens);
  }
  return out;
}

Requests repeated_prefixes(const WorkloadOptions& options, const Words& words) {
  std::mt19937_64 random(options.seed);
  std::vector<std::vector<int32_t>> prefixes(options.prefixes);
  for (auto& prefix : prefixes) append_random(options.prefix_tokens, words, random, prefix);
  Requests out(options.requests);
  for (size_t i = 0; i < out.size(); ++i) {
    out[i].tokens = prefixes[i % prefixes.size()];
    append_random(options.suffix_tokens, words, random, out[i].tokens);
    out[i].output = output_of(options);
  }
  std::shuffle(out.begin(), out.end(), random);
  return out;
}

// The means are those of 1,000 requests that vLLM's benchmark draws from the dataset.
Requests sharegpt_lengths(const WorkloadOptions& options, const Words& words) {
  constexpr double kInput = 215, kOutput = 198, kSpread = 1;
  std::mt19937_64 random(options.seed);
  std::normal_distribution<double> normal;
  const auto length = [&](double mean) {
    const double drawn = mean * std::exp(kSpread * normal(random) - kSpread * kSpread / 2);
    return static_cast<size_t>(std::clamp(drawn, 4.0, 1024.0));
  };
  Requests out(options.requests);
  for (LoadRequest& request : out) {
    append_random(length(kInput), words, random, request.tokens);
    const size_t output = length(kOutput);
    request.output = options.output > 0 ? options.output : static_cast<int>(output);
  }
  return out;
}

}  // namespace

void append_random(size_t count, const Words& words, std::mt19937_64& random,
                   std::vector<int32_t>& to) {
  to.reserve(to.size() + count);
  for (size_t i = 0; i < count; ++i) to.push_back(words.tokens[random() % words.tokens.size()]);
}

std::vector<std::string> dataset_names() {
  std::vector<std::string> names;
  for (const Dataset& dataset : kDatasets) names.emplace_back(dataset.name);
  return names;
}

Needs needs_of(const WorkloadOptions& options) {
  for (const Dataset& dataset : kDatasets) {
    if (options.dataset == dataset.name) return dataset.needs;
  }
  return {};
}

absl::StatusOr<Requests> make_workload(const WorkloadOptions& options, const Words& words) {
  if (needs_of(options).words && words.tokens.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("dataset ", options.dataset, " needs words"));
  }
  if (options.dataset == "text") return passages(options);
  if (options.dataset == "random") return random_tokens(options, words);
  if (options.dataset == "prefix_repetition") return repeated_prefixes(options, words);
  if (options.dataset == "custom") return read_prompts(options);
  if (options.dataset == "mooncake") return read_mooncake_trace(options, words);
  if (options.file.empty()) return sharegpt_lengths(options, words);
  return read_sharegpt(options, words);
}

std::vector<Time> arrivals(size_t count, double rate, double burstiness, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::gamma_distribution<double> gap(burstiness, 1 / (rate * burstiness));
  std::vector<double> at(count);
  double sum = 0;
  for (double& time : at) time = sum += gap(random);
  const double scale = sum > 0 ? static_cast<double>(count) / rate / sum : 1;
  std::vector<Time> out(count);
  std::transform(at.begin(), at.end(), out.begin(), [&](double time) {
    return std::chrono::duration_cast<Time>(std::chrono::duration<double>(time * scale));
  });
  return out;
}

}  // namespace baton::engine::load
