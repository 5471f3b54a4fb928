// vLLM's metrics, by its names and with its labels, so that its dashboards and autoscalers find
// what they look for. What we cannot say truthfully is not there.
#include <utility>

#include "engine/serve/metrics.h"

namespace baton::engine::serve {

void ServingMetrics::print_as_vllm(const EngineStats& engine, std::string_view model,
                                   std::string* out) const {
  PrometheusPage page("vllm:", {{"model_name", std::string(model)}, {"engine", "0"}}, out);
  page.histogram("time_to_first_token_seconds", "As baton_time_to_first_token_seconds.", ttft_);
  page.histogram("inter_token_latency_seconds", "As baton_inter_token_latency_seconds.", itl_);
  page.histogram("request_time_per_output_token_seconds", "As baton_time_per_output_token_seconds.",
                 tpot_);
  page.histogram("e2e_request_latency_seconds", "As baton_request_latency_seconds.", e2e_);
  page.histogram("request_queue_time_seconds", "From arrival until it left the queue.", queue_);
  page.histogram("request_prefill_time_seconds",
                 "From leaving the queue to the first token, with what it waited for KV.",
                 prefill_);
  page.histogram("request_decode_time_seconds", "From the first token to the last.", decode_);
  page.histogram("request_inference_time_seconds", "From leaving the queue to the last token.",
                 inference_);
  page.histogram("request_prompt_tokens", "Tokens of a prompt.", prompt_length_);
  page.histogram("request_generation_tokens", "Tokens written for a request.", output_length_);
  page.histogram("request_params_max_tokens", "Tokens that a request allows.", max_tokens_);
  page.single("num_requests_running", "As baton_requests_running.", "gauge", engine.running);
  page.single("num_requests_waiting", "Requests in the queue, or whose KV is arriving.", "gauge",
              engine.waiting + engine.loading);
  page.header("num_requests_waiting_by_reason",
              "capacity: in the queue; deferred: its KV is arriving.", "gauge");
  for (const auto& [reason, count] :
       {std::pair("capacity", engine.waiting), {"deferred", engine.loading}}) {
    page.line("num_requests_waiting_by_reason", PrometheusPage::label("reason", reason), count);
  }
  const double used =
      engine.blocks == 0 ? 0 : 1.0 - static_cast<double>(engine.free_blocks) / engine.blocks;
  page.single("kv_cache_usage_perc", "Part of the KV cache in use, 0 to 1.", "gauge", used);
  page.single("prompt_tokens_total", "As baton_prompt_tokens_total.", "counter", prompt_tokens_);
  page.single("generation_tokens_total", "As baton_output_tokens_total.", "counter",
              output_tokens_);
  page.single("prompt_tokens_cached_total", "Prompt tokens whose KV was not computed here.",
              "counter", engine.hit_tokens + engine.external_hit_tokens);
  page.single("prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.",
              "counter", engine.lookup_tokens);
  page.single("prefix_cache_hits_total", "... and found there.", "counter", engine.hit_tokens);
  page.single("external_prefix_cache_queries_total",
              "Prompt tokens that were not, and that a prefill worker or KV tiers were asked for.",
              "counter", engine.external_lookup_tokens);
  page.single("external_prefix_cache_hits_total", "... and had.", "counter",
              engine.external_hit_tokens);
  page.single("num_preemptions_total", "As baton_preemptions_total.", "counter",
              engine.preemptions);
  page.header("request_success_total", "Requests that ended, by reason.", "counter");
  for (const FinishReason reason :
       {FinishReason::kStop, FinishReason::kLength, FinishReason::kAbort, FinishReason::kError}) {
    page.line("request_success_total",
              PrometheusPage::label("finished_reason", finish_reason_name(reason)),
              finished_[static_cast<size_t>(reason)]);
  }
}

}  // namespace baton::engine::serve
