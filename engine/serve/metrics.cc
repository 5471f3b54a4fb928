// Latency histograms and counters, and their Prometheus text form.
#include "engine/serve/metrics.h"

#include <algorithm>
#include <chrono>

#include "absl/strings/str_cat.h"
#include "engine/files/strings.h"
#include "transport/base/quantile.h"

namespace baton::engine::serve {
namespace {

double seconds(Time time) { return std::chrono::duration<double>(time).count(); }

void header(std::string_view name, std::string_view help, std::string_view type, std::string* out) {
  absl::StrAppend(out, "# HELP baton_", view(name), " ", view(help), "\n# TYPE baton_", view(name),
                  " ", view(type), "\n");
}

template <typename Value>
void single(std::string_view name, std::string_view help, std::string_view type, Value value,
            std::string* out) {
  header(name, help, type, out);
  absl::StrAppend(out, "baton_", view(name), " ", value, "\n");
}

}  // namespace

double percentile(std::vector<double> values, double p) {
  return interpolated_quantile(std::move(values), p / 100);
}

void ServingMetrics::Histogram::add(Time value) {
  const double s = seconds(value);
  ++counts[static_cast<size_t>(std::lower_bound(kBounds.begin(), kBounds.end(), s) -
                               kBounds.begin())];
  sum += s;
}

void ServingMetrics::Histogram::print(std::string_view name, std::string_view help,
                                      std::string* out) const {
  header(name, help, "histogram", out);
  uint64_t total = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    total += counts[i];
    absl::StrAppend(out, "baton_", view(name), "_bucket{le=\"");
    if (i < kBounds.size()) {
      absl::StrAppend(out, kBounds[i]);
    } else {
      absl::StrAppend(out, "+Inf");
    }
    absl::StrAppend(out, "\"} ", total, "\n");
  }
  absl::StrAppend(out, "baton_", view(name), "_sum ", sum, "\nbaton_", view(name), "_count ", total,
                  "\n");
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
  single("kv_blocks_quarantined", "Blocks that a stopped load may still write to.", "gauge",
         engine.quarantined_blocks, &out);
  return out;
}

}  // namespace baton::engine::serve
