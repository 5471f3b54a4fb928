// Sends a workload to a server, in time or as quickly as answers come, on one thread whatever the
// number of requests.
#pragma once

#include <chrono>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/load/client.h"
#include "engine/load/workload.h"
#include "transport/clock.h"

namespace baton::engine::load {

struct LoadOptions {
  std::vector<Time> at;    // when each request is sent, in order; empty: at once
  size_t concurrency = 0;  // no more are open at a time: others wait for their turn; 0: all
  uint64_t seed = 1;
  std::chrono::milliseconds timeout = patient(std::chrono::milliseconds(600'000));  // of an answer
};

struct LoadResult {
  std::vector<Answer> answers;  // in the order of the requests
  Time duration{};
  size_t most_open = 0;  // requests at a time
};

// Waits for all answers. Not to be called on the loop's thread.
LoadResult run_load(const std::shared_ptr<http::EventLoop>& loop, const Server& server,
                    const std::vector<LoadRequest>& requests, const LoadOptions& options);

// The options of a load's report, which has the definitions and the JSON keys of `vllm bench
// serve`.
struct ReportOptions {
  // Latencies to report: ttft (to the first token), tpot (per further token), itl (between two
  // tokens), e2el (to the last one), and for Baton's servers queued and kv_wait.
  std::vector<std::string> metrics = {"ttft", "tpot", "itl", "e2el"};
  std::vector<double> percentiles = {99};
  bool detailed = false;  // every request, too
};

// "50,90,99.9", each above 0 and at most 100.
absl::StatusOr<std::vector<double>> parse_percentiles(std::string_view text);

// Answers to the same requests in several loads are one: durations add up.
LoadResult joined(std::vector<LoadResult> rounds);

nlohmann::json report_of(const LoadResult& result, const ReportOptions& options);

// For people: a line for each figure, a column for each (name, report), and behind every one but
// the first its ratio to it.
std::string table_of(const std::vector<std::pair<std::string, nlohmann::json>>& reports,
                     const ReportOptions& options);

}  // namespace baton::engine::load
