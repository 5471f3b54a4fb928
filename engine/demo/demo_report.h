// The demo's results, as a short table and as one self-contained HTML page.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/demo/overlap.h"

namespace baton::engine::demo {

// Latencies of one way of serving, in milliseconds.
struct DemoLatencies {
  std::string name;
  std::vector<double> ttft, tpot, itl;
};

// One way of getting the KV across the shaped link.
struct DemoLinkRun {
  std::string name;
  std::vector<double> ttft_ms;
  bool has_transfer = false;
  Overlap overlap;          // of the timeline
  nlohmann::json timeline;  // {"traceEvents": [...]} of all processes
};

struct DemoResults {
  std::string model;
  size_t parameters = 0;
  int layers = 0;
  size_t prompts = 0, shortest_prompt = 0, longest_prompt = 0;  // tokens
  size_t tokens_compared = 0;
  std::string sample_prompt, sample_text;
  std::vector<DemoLatencies> latencies;
  Overlap moved;  // by the pair, over the real link
  std::string route;
  double route_gb_per_second = 0;  // of a prompt's KV, sent in one go

  size_t link_prompt = 0;  // tokens
  size_t link_bytes = 0;   // of KV per request
  double link_bytes_per_second = 0;
  double ratio = 0;                    // transfer / prefill that was asked for
  std::vector<DemoLinkRun> link_runs;  // the first one is the process alone
};

std::string latency_table(const DemoResults& results);
std::string link_table(const DemoResults& results);
std::string html_report(const DemoResults& results);

}  // namespace baton::engine::demo
