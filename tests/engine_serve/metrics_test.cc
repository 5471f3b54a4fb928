// What /metrics says: the numbers, and by vLLM's names all that its dashboards ask for.
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
  request.max_tokens = 7;
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
  engine.lookup_tokens = 100;
  engine.hit_tokens = 48;
  engine.external_lookup_tokens = 52;
  engine.external_hit_tokens = 32;
  WorkerStats worker;
  worker.peers_up = 7;
  worker.rails_lost = 8;
  worker.handshakes_refused = 9;
  worker.registrations = 10;
  const NamedWorkerStats workers[] = {{"connector", worker}, {"kv_agent", {}}};
  return metrics.prometheus(engine, "a \"model\"") + worker_metrics(workers);
}

std::vector<std::string> lines_of(const std::string& text) {
  return absl::StrSplit(text, '\n', absl::SkipEmpty());
}

TEST(Metrics, ByVllmsNamesWithItsLabels) {
  // Of histograms the sums and counts.
  std::string found;
  for (const std::string& line : lines_of(page())) {
    if (line.starts_with("vllm:") && line.find("_bucket{") == std::string::npos) {
      found += line + "\n";
    }
  }
  std::string want =
      R"(vllm:time_to_first_token_seconds_sum{} 3
vllm:time_to_first_token_seconds_count{} 1
vllm:inter_token_latency_seconds_sum{} 3
vllm:inter_token_latency_seconds_count{} 2
vllm:request_time_per_output_token_seconds_sum{} 1.5
vllm:request_time_per_output_token_seconds_count{} 1
vllm:e2e_request_latency_seconds_sum{} 6
vllm:e2e_request_latency_seconds_count{} 1
vllm:request_queue_time_seconds_sum{} 2
vllm:request_queue_time_seconds_count{} 1
vllm:request_prefill_time_seconds_sum{} 1
vllm:request_prefill_time_seconds_count{} 1
vllm:request_decode_time_seconds_sum{} 3
vllm:request_decode_time_seconds_count{} 1
vllm:request_inference_time_seconds_sum{} 4
vllm:request_inference_time_seconds_count{} 1
vllm:request_prompt_tokens_sum{} 100
vllm:request_prompt_tokens_count{} 1
vllm:request_generation_tokens_sum{} 3
vllm:request_generation_tokens_count{} 1
vllm:request_params_max_tokens_sum{} 7
vllm:request_params_max_tokens_count{} 1
vllm:num_requests_running{} 2
vllm:num_requests_waiting{} 7
vllm:num_requests_waiting_by_reason{,reason="capacity"} 3
vllm:num_requests_waiting_by_reason{,reason="deferred"} 4
vllm:kv_cache_usage_perc{} 0.75
vllm:prompt_tokens_total{} 105
vllm:generation_tokens_total{} 3
vllm:prompt_tokens_cached_total{} 80
vllm:prefix_cache_queries_total{} 100
vllm:prefix_cache_hits_total{} 48
vllm:external_prefix_cache_queries_total{} 52
vllm:external_prefix_cache_hits_total{} 32
vllm:num_preemptions_total{} 6
vllm:request_success_total{,finished_reason="stop"} 1
vllm:request_success_total{,finished_reason="length"} 0
vllm:request_success_total{,finished_reason="abort"} 1
vllm:request_success_total{,finished_reason="error"} 0
)";
  for (size_t at = 0; (at = want.find('{', at)) != std::string::npos; ++at) {
    want.insert(at + 1, R"(model_name="a \"model\"",engine="0")");
  }
  EXPECT_EQ(found, want);
}

TEST(Metrics, TheWorkersOfBatonsAreThere) {
  const std::string text = page();
  for (const char* line : {"baton_worker_peers_up{worker=\"connector\"} 7",
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
  PrometheusPage page("x_", {}, &out);
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
