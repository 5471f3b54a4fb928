// Latency histograms and counters, and their Prometheus text form.
#include "engine/serve/metrics.h"

#include <algorithm>
#include <chrono>

#include "absl/strings/str_cat.h"
#include "engine/files/absl_view.h"
#include "transport/base/quantile.h"

namespace baton::engine::serve {
namespace {

constexpr std::string_view kPrefix = "baton_";

void header(std::string_view name, std::string_view help, std::string_view type, std::string* out,
            std::string_view prefix = kPrefix) {
  absl::StrAppend(out, "# HELP ", view(prefix), view(name), " ", view(help), "\n# TYPE ",
                  view(prefix), view(name), " ", view(type), "\n");
}

template <typename Value>
void single(std::string_view name, std::string_view help, std::string_view type, Value value,
            std::string* out, std::string_view prefix = kPrefix) {
  header(name, help, type, out, prefix);
  absl::StrAppend(out, view(prefix), view(name), " ", value, "\n");
}

}  // namespace

double percentile(std::vector<double> values, double p) {
  return base::interpolated_quantile(std::move(values), p / 100);
}

void ServingMetrics::Histogram::add(Time value) {
  const double s = seconds_of(value);
  ++counts[static_cast<size_t>(std::lower_bound(kBounds.begin(), kBounds.end(), s) -
                               kBounds.begin())];
  sum += s;
}

void ServingMetrics::Histogram::print(std::string_view name, std::string_view help,
                                      std::string* out, std::string_view prefix) const {
  header(name, help, "histogram", out, prefix);
  uint64_t total = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    total += counts[i];
    absl::StrAppend(out, view(prefix), view(name), "_bucket{le=\"");
    if (i < kBounds.size()) {
      absl::StrAppend(out, kBounds[i]);
    } else {
      absl::StrAppend(out, "+Inf");
    }
    absl::StrAppend(out, "\"} ", total, "\n");
  }
  absl::StrAppend(out, view(prefix), view(name), "_sum ", sum, "\n", view(prefix), view(name),
                  "_count ", total, "\n");
}

void ServingMetrics::observe(const RequestMetrics& metrics, FinishReason reason) {
  const std::lock_guard lock(mutex_);
  ++finished_[static_cast<size_t>(reason)];
  prompt_tokens_ += metrics.prompt_tokens;
  output_tokens_ += metrics.output_tokens;
  if (metrics.output_tokens == 0) return;
  ttft_.add(metrics.ttft());
  e2e_.add(metrics.finish - metrics.arrival);
  if (metrics.output_tokens > 1) tpot_.add(metrics.tpot());
  for (Time gap : metrics.gaps) itl_.add(gap);
}

std::string ServingMetrics::prometheus(const EngineStats& engine,
                                       const kvtransfer::KvConnectorStats& connector) const {
  std::string out;
  const std::lock_guard lock(mutex_);
  ttft_.print("time_to_first_token_seconds", "From arrival to the first token.", &out);
  itl_.print("inter_token_latency_seconds", "Between two tokens of a request.", &out);
  tpot_.print("time_per_output_token_seconds", "Mean over a request, first token excluded.", &out);
  e2e_.print("request_latency_seconds", "From arrival to the last token.", &out);
  header("requests_total", "Requests that ended, by reason.", "counter", &out);
  for (FinishReason reason :
       {FinishReason::kStop, FinishReason::kLength, FinishReason::kAbort, FinishReason::kError}) {
    absl::StrAppend(&out, "baton_requests_total{reason=\"", view(finish_reason_name(reason)),
                    "\"} ", finished_[static_cast<size_t>(reason)], "\n");
  }
  single("prompt_tokens_total", "Prompt tokens of requests that ended.", "counter", prompt_tokens_,
         &out);
  single("output_tokens_total", "Tokens generated.", "counter", output_tokens_, &out);
  single("steps_total", "Forward passes.", "counter", engine.steps, &out);
  single("tokens_computed_total", "Tokens that went through the model.", "counter",
         engine.tokens_computed, &out);
  single("prefix_cached_tokens_total", "Prompt tokens found in the prefix cache.", "counter",
         engine.cached_tokens, &out);
  single("kv_loaded_tokens_total", "Prompt tokens whose KV came from a prefill worker.", "counter",
         engine.loaded_tokens, &out);
  single("kv_tier_tokens_total", "Prompt tokens whose KV came from the KV tiers.", "counter",
         engine.tier_tokens, &out);
  print_tiers(engine.tiers, &out);
  single("kv_loads_failed_total", "KV loads that failed.", "counter", engine.loads_failed, &out);
  single("kv_bytes_sent_total", "KV bytes sent to decode workers.", "counter", connector.bytes_sent,
         &out);
  single("kv_bytes_loaded_total", "KV bytes received from prefill workers.", "counter",
         connector.bytes_loaded, &out);
  single("prefill_jobs_total", "Prompts computed for decode workers.", "counter",
         engine.jobs_finished, &out);
  single("preemptions_total", "Sequences that gave their blocks up.", "counter", engine.preemptions,
         &out);
  single("requests_waiting", "Requests in the queue.", "gauge", engine.waiting, &out);
  single("requests_running", "Requests in the batch.", "gauge", engine.running, &out);
  single("requests_loading", "Requests whose KV is arriving.", "gauge", engine.loading, &out);
  single("kv_blocks_free", "Free blocks of the KV cache.", "gauge", engine.free_blocks, &out);
  single("kv_blocks_cached", "Blocks that a prompt's beginning can be found in.", "gauge",
         engine.cached_blocks, &out);
  single("kv_blocks_quarantined", "Blocks that a stopped load may still write to.", "gauge",
         engine.quarantined_blocks, &out);
  print_as_vllm(engine, &out);
  return out;
}

void ServingMetrics::print_tiers(const kvtransfer::tiers::TierStats& tiers, std::string* out) {
  single("kv_tier_host_bytes", "Host memory that KV tiers use.", "gauge", tiers.host_bytes, out);
  single("kv_tier_host_blocks", "KV blocks in the tier in host memory.", "gauge",
         tiers.host_records, out);
  single("kv_tier_disk_blocks", "KV blocks in the tier on disk.", "gauge", tiers.disk_records, out);
  single("kv_tier_blocks_saved_total", "KV blocks copied to the tiers.", "counter", tiers.saved,
         out);
  single("kv_tier_blocks_dropped_total", "KV blocks that the tiers were too busy for.", "counter",
         tiers.dropped, out);
  single("kv_tier_blocks_evicted_total", "KV blocks that made room for others.", "counter",
         tiers.evicted, out);
  header("kv_tier_blocks_loaded_total", "KV blocks that came back.", "counter", out);
  absl::StrAppend(out, "baton_kv_tier_blocks_loaded_total{tier=\"host\"} ", tiers.from_host,
                  "\nbaton_kv_tier_blocks_loaded_total{tier=\"disk\"} ", tiers.from_disk,
                  "\nbaton_kv_tier_blocks_loaded_total{tier=\"peer\"} ", tiers.from_peer, "\n");
  single("kv_tier_silences_total", "Times that the KV store did not answer in time.", "counter",
         tiers.silences, out);
  single("kv_tier_blocks_corrupt_total", "KV blocks that were not what had been saved.", "counter",
         tiers.corrupt, out);
}

// The names of vLLM's metrics, so that its dashboards and autoscalers find what they look for.
void ServingMetrics::print_as_vllm(const EngineStats& engine, std::string* out) const {
  const std::string_view p = "vllm:";
  ttft_.print("time_to_first_token_seconds", "As baton_time_to_first_token_seconds.", out, p);
  itl_.print("inter_token_latency_seconds", "As baton_inter_token_latency_seconds.", out, p);
  tpot_.print("request_time_per_output_token_seconds", "As baton_time_per_output_token_seconds.",
              out, p);
  e2e_.print("e2e_request_latency_seconds", "As baton_request_latency_seconds.", out, p);
  single("num_requests_running", "As baton_requests_running.", "gauge", engine.running, out, p);
  single("num_requests_waiting", "Requests in the queue, or whose KV is arriving.", "gauge",
         engine.waiting + engine.loading, out, p);
  const double used =
      engine.blocks == 0 ? 0 : 1.0 - static_cast<double>(engine.free_blocks) / engine.blocks;
  single("kv_cache_usage_perc", "Part of the KV cache in use, 0 to 1.", "gauge", used, out, p);
  single("prompt_tokens_total", "As baton_prompt_tokens_total.", "counter", prompt_tokens_, out, p);
  single("generation_tokens_total", "As baton_output_tokens_total.", "counter", output_tokens_, out,
         p);
  single("num_preemptions_total", "As baton_preemptions_total.", "counter", engine.preemptions, out,
         p);
  header("request_success_total", "Requests that were answered, by reason.", "counter", out, p);
  for (FinishReason reason : {FinishReason::kStop, FinishReason::kLength}) {
    absl::StrAppend(out, "vllm:request_success_total{finished_reason=\"",
                    view(finish_reason_name(reason)), "\"} ",
                    finished_[static_cast<size_t>(reason)], "\n");
  }
}

}  // namespace baton::engine::serve
