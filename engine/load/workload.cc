// Makes requests of random tokens or of the demo's texts, and the moments at which they are sent.
#include "engine/load/workload.h"

#include <algorithm>
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

using nlohmann::json;
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

void append_random(size_t count, const Words& words, std::mt19937_64& random,
                   std::vector<int32_t>& to) {
  to.reserve(to.size() + count);
  for (size_t i = 0; i < count; ++i) to.push_back(words.tokens[random() % words.tokens.size()]);
}

Requests random_tokens(const WorkloadOptions& options, const Words& words) {
  std::mt19937_64 random(options.seed);
  Requests out(options.requests);
  for (LoadRequest& request : out) {
    request.output = output_of(options);
    append_random(options.input, words, random, request.tokens);
  }
  return out;
}

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
        // A block without a hash equals no other block.
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

}  // namespace

std::vector<std::string> dataset_names() { return {"text", "random", "mooncake"}; }

Needs needs_of(const WorkloadOptions& options) {
  return {.words = options.dataset != "text", .file = options.dataset == "mooncake"};
}

absl::StatusOr<Requests> make_workload(const WorkloadOptions& options, const Words& words) {
  if (needs_of(options).words && words.tokens.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("dataset ", options.dataset, " needs words"));
  }
  if (options.dataset == "text") return passages(options);
  if (options.dataset == "random") return random_tokens(options, words);
  return read_mooncake_trace(options, words);
}

std::vector<Time> arrivals(size_t count, double rate, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::exponential_distribution<double> gap(rate);
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
