// Makes requests of random tokens or of the demo's texts, and the moments at which they are sent.
#include "engine/load/workload.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "engine/demo/demo.h"
#include "engine/files/files.h"
#include "engine/files/json_fields.h"
#include "transport/base/splitmix.h"

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

namespace {

using nlohmann::json;
using Requests = std::vector<LoadRequest>;

constexpr int kMostTokens = 1 << 24;  // in a prompt or an answer

absl::Status in_line(const WorkloadOptions& options, size_t line, const absl::Status& why) {
  return absl::InvalidArgumentError(
      absl::StrCat(options.file, ", line ", line, ": ", std::string(why.message())));
}

// The first `options.requests` lines that are not empty.
absl::StatusOr<Requests> read_lines(
    const WorkloadOptions& options,
    const std::function<absl::StatusOr<LoadRequest>(const json&)>& read_line) {
  const absl::StatusOr<std::string> text = read_file(options.file);
  if (!text.ok()) return text.status();
  Requests out;
  size_t number = 0;
  for (std::string_view rest = *text; !rest.empty() && out.size() < options.requests;) {
    const size_t end = std::min(rest.find('\n'), rest.size());
    const std::string_view line = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const absl::StatusOr<json> value = parse_json(line, "the line");
    if (!value.ok()) return in_line(options, number, value.status());
    if (!value->is_object()) {
      return in_line(options, number, absl::InvalidArgumentError("it is not a JSON object"));
    }
    absl::StatusOr<LoadRequest> request = read_line(*value);
    if (!request.ok()) return in_line(options, number, request.status());
    out.push_back(*std::move(request));
  }
  if (out.empty()) return absl::NotFoundError(absl::StrCat(options.file, " has no requests"));
  return out;
}

size_t scaled(int64_t length, double scale) {
  return std::max<size_t>(1,
                          static_cast<size_t>(std::llround(static_cast<double>(length) * scale)));
}

// The text of a turn, or "".
std::string turn(const json& conversations, size_t number) {
  if (!conversations.is_array() || conversations.size() <= number) return "";
  return string_field(conversations[number], "value", "").value_or("");
}

}  // namespace

absl::StatusOr<Requests> read_prompts(const WorkloadOptions& options) {
  return read_lines(options, [&](const json& line) -> absl::StatusOr<LoadRequest> {
    LoadRequest request;
    const auto prompt = string_field(line, "prompt", "");
    if (!prompt.ok()) return prompt.status();
    if (prompt->empty()) return absl::InvalidArgumentError("it has no \"prompt\"");
    const auto output = int_field(line, "output_tokens", 1, kMostTokens, WorkloadOptions::kOutput);
    if (!output.ok()) return output.status();
    request.text = *prompt;
    request.output = options.output > 0 ? options.output : static_cast<int>(*output);
    return request;
  });
}

// What is too short to say anything, or longer than most models of its time took, is left out, as
// vLLM's benchmark does.
absl::StatusOr<Requests> read_sharegpt(const WorkloadOptions& options, const Words& words) {
  constexpr double kLeast = 4, kMostInput = 1024, kMostInAll = 2048;
  const absl::StatusOr<std::string> text = read_file(options.file, size_t{4} << 30);
  if (!text.ok()) return text.status();
  const absl::StatusOr<json> all = parse_json(*text, options.file);
  if (!all.ok()) return all.status();
  if (!all->is_array()) {
    return absl::InvalidArgumentError(
        absl::StrCat(options.file, " is not a list of conversations"));
  }
  Requests out;
  for (const json& conversation : *all) {
    const json& turns = member(conversation, "conversations");
    LoadRequest request{.text = turn(turns, 0)};
    const double input = std::ceil(static_cast<double>(request.text.size()) * words.per_byte);
    double output = std::ceil(static_cast<double>(turn(turns, 1).size()) * words.per_byte);
    if (options.output > 0 && output > 0) output = options.output;
    if (input < kLeast || output < kLeast || input > kMostInput || input + output > kMostInAll) {
      continue;
    }
    request.output = static_cast<int>(output);
    out.push_back(std::move(request));
  }
  if (out.empty()) {
    return absl::NotFoundError(
        absl::StrCat(options.file, " has no conversation of a question and an answer"));
  }
  std::mt19937_64 random(options.seed);
  std::shuffle(out.begin(), out.end(), random);
  if (out.size() > options.requests) out.resize(options.requests);
  return out;
}

absl::StatusOr<Requests> read_mooncake_trace(const WorkloadOptions& options, const Words& words) {
  constexpr int64_t kHashed = 512;  // tokens behind a hash
  const size_t block = scaled(kHashed, options.trace_scale);
  absl::StatusOr<Requests> out =
      read_lines(options, [&](const json& line) -> absl::StatusOr<LoadRequest> {
        const auto at = number_field(line, "timestamp", 0, 1e12, 0);
        const auto input = int_field(line, "input_length", 1, kMostTokens, 0);
        const auto output = int_field(line, "output_length", 1, kMostTokens, 0);
        for (const absl::Status& status : {at.status(), input.status(), output.status()}) {
          if (!status.ok()) return status;
        }
        if (*input == 0) return absl::InvalidArgumentError("it has no \"input_length\"");
        if (*output == 0) return absl::InvalidArgumentError("it has no \"output_length\"");
        LoadRequest request{
            .at = std::chrono::duration_cast<Time>(
                std::chrono::duration<double, std::milli>(*at / options.trace_speed))};
        request.output = options.output > 0
                             ? options.output
                             : static_cast<int>(scaled(*output, options.trace_scale));
        const size_t tokens = scaled(*input, options.trace_scale);
        const json& hashes = member(line, "hash_ids");
        if (!hashes.is_null() && !hashes.is_array()) {
          return absl::InvalidArgumentError("\"hash_ids\" is not a list");
        }
        for (const json& hash : hashes) {
          if (!hash.is_number_integer()) {
            return absl::InvalidArgumentError(
                "\"hash_ids\" has an entry that is not a whole number");
          }
          std::mt19937_64 random(
              base::splitmix(options.seed ^ base::splitmix(hash.get<uint64_t>())));
          append_random(block, words, random, request.tokens);
          if (request.tokens.size() >= tokens) break;
        }
        // What has no hash is like nothing else.
        std::mt19937_64 random(
            base::splitmix(options.seed ^ static_cast<uint64_t>(request.at.count())));
        if (request.tokens.size() < tokens) {
          append_random(tokens - request.tokens.size(), words, random, request.tokens);
        }
        request.tokens.resize(tokens);
        return request;
      });
  if (!out.ok()) return out;
  std::stable_sort(out->begin(), out->end(),
                   [](const auto& a, const auto& b) { return a.at < b.at; });
  const Time first = out->front().at;
  for (LoadRequest& request : *out) request.at -= first;
  return out;
}

}  // namespace baton::engine::load
