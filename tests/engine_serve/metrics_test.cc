// What /metrics says.
#include "engine/serve/metrics.h"

#include "absl/strings/str_split.h"
#include "tests/test.h"

namespace baton::engine::serve {
namespace {

using namespace std::chrono_literals;

// One request of 100 prompt tokens and 3 of output, and what an engine may say of itself.
std::string page() {
  ServingMetrics metrics;
  RequestMetrics request;
  request.arrival = 10s;
  request.admitted = 12s;
  request.first_token = 13s;
  request.last_token = 16s;
  request.finish = 16s;
  request.gaps = {1s, 2s};
  request.prompt_tokens = 100;
  request.output_tokens = 3;
  metrics.observe(request, FinishReason::kStop);
  RequestMetrics left;
  left.prompt_tokens = 5;
  metrics.observe(left, FinishReason::kAbort);
  EngineStats engine;
  engine.running = 2;
  engine.waiting = 3;
  engine.loading = 4;
  engine.blocks = 100;
  engine.free_blocks = 25;
  engine.preemptions = 6;
  WorkerStats worker;
  worker.peers_up = 7;
  worker.rails_lost = 8;
  worker.handshakes_refused = 9;
  worker.registrations = 10;
  const NamedWorkerStats workers[] = {{"connector", worker}, {"kv_agent", {}}};
  return metrics.prometheus(engine) + worker_metrics(workers);
}

std::vector<std::string> lines_of(const std::string& text) {
  return absl::StrSplit(text, '\n', absl::SkipEmpty());
}

TEST(Metrics, SayWhatWasSeen) {
  const std::string text = page();
  for (const char* line :
       {"baton_time_to_first_token_seconds_sum 3", "baton_inter_token_latency_seconds_count 2",
        "baton_time_per_output_token_seconds_sum 1.5", "baton_request_latency_seconds_sum 6",
        "baton_requests_running 2", "baton_requests_waiting 3", "baton_requests_loading 4",
        "baton_kv_blocks_free 25", "baton_preemptions_total 6", "baton_prompt_tokens_total 105",
        "baton_output_tokens_total 3", "baton_requests_total{reason=\"abort\"} 1",
        "baton_worker_peers_up{worker=\"connector\"} 7",
        "baton_worker_peers_up{worker=\"kv_agent\"} 0",
        "baton_worker_rails_lost_total{worker=\"connector\"} 8",
        "baton_worker_handshakes_refused_total{worker=\"connector\"} 9",
        "baton_worker_registrations_total{worker=\"connector\"} 10"}) {
    EXPECT_NE(text.find(line), std::string::npos) << line;
  }
}

TEST(Metrics, EveryLineIsOneOfPrometheus) {
  std::set<std::string> declared, told;
  for (const std::string& line : lines_of(page())) {
    if (line.starts_with("# TYPE ")) {
      EXPECT_TRUE(declared.insert(line.substr(7, line.rfind(' ') - 7)).second) << line;
    }
    if (line.starts_with("#")) continue;
    const std::string series = line.substr(0, line.rfind(' '));
    EXPECT_TRUE(told.insert(series).second) << line << " is there twice";
    std::string name = series.substr(0, series.find('{'));
    for (const char* part : {"_bucket", "_sum", "_count"}) {
      if (!declared.contains(name) && name.ends_with(part)) {
        name.resize(name.size() - std::string(part).size());
      }
    }
    EXPECT_TRUE(declared.contains(name)) << line << " has no type";
    EXPECT_EQ(series.find('{') == std::string::npos, series.back() != '}') << line;
  }
  EXPECT_TRUE(told.contains(R"(baton_request_latency_seconds_bucket{le="+Inf"})"));
  EXPECT_TRUE(told.contains(R"(baton_kv_tier_blocks_loaded_total{tier="peer"})"));
}

TEST(Metrics, BucketsCountWhatIsNotAboveThem) {
  std::string out;
  PrometheusPage page("x_", &out);
  constexpr double kBounds[] = {1, 2.5};
  Histogram values(kBounds);
  for (const double value : {0.5, 1.0, 2.0, 9.0}) values.add(value);
  page.histogram("h", "Help.", values);
  EXPECT_EQ(out,
            "# HELP x_h Help.\n# TYPE x_h histogram\nx_h_bucket{le=\"1\"} 2\n"
            "x_h_bucket{le=\"2.5\"} 3\nx_h_bucket{le=\"+Inf\"} 4\nx_h_sum 12.5\nx_h_count 4\n");
}

}  // namespace
}  // namespace baton::engine::serve
