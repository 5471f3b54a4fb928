// The demo's results, and how they are told.
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace baton::engine::demo {

// How much of a transfer was hidden behind computation, from an exported timeline.
struct Overlap {
  double transfer_us = 0;  // during which KV was on its way
  double hidden_us = 0;    // of that, while the sending process computed
  double compute_us = 0;
  uint64_t bytes = 0;
  size_t requests = 0;

  double hidden_share() const { return transfer_us > 0 ? hidden_us / transfer_us : 0; }
};

// Reads Perfetto (Chrome trace event) JSON: complete events ("ph": "X") of category "transfer" and
// "compute". Time counts as transfer while at least one transfer span of a request is open, and as
// hidden while the same process also has a compute span open for the same request. Requests are
// taken one by one and added up. InvalidArgument if the text is no such timeline.
absl::StatusOr<Overlap> measure_overlap(std::string_view json);

// One way of getting the KV across the shaped link.
struct DemoLinkRun {
  std::string name;
  std::vector<double> ttft_ms;
  bool has_transfer = false;
  Overlap overlap;          // of the timeline
  nlohmann::json timeline;  // {"traceEvents": [...]} of both processes
};

struct DemoResults {
  std::string model;
  size_t parameters = 0;
  int layers = 0;
  size_t prompts = 0, shortest_prompt = 0, longest_prompt = 0;  // tokens
  size_t tokens_compared = 0;
  Overlap moved;  // by the pair, over the real link
  std::string route;

  size_t link_prompt = 0;  // tokens
  size_t link_bytes = 0;   // of KV per request
  double link_bytes_per_second = 0;
  double ratio = 0;                    // transfer / prefill that was asked for
  std::vector<DemoLinkRun> link_runs;  // the first one is the process alone
};

std::string moved_line(const DemoResults& results);
std::string link_table(const DemoResults& results);

}  // namespace baton::engine::demo
