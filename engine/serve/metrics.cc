// Latency histograms and counters, and their Prometheus text form.
#include "engine/serve/metrics.h"

#include <utility>

#include "transport/base/quantile.h"

namespace baton::engine::serve {

double percentile(std::vector<double> values, double p) {
  return base::interpolated_quantile(std::move(values), p / 100);
}

void ServingMetrics::observe(const RequestMetrics& metrics, FinishReason reason) {
  const std::lock_guard lock(mutex_);
  ++finished_[static_cast<size_t>(reason)];
  prompt_tokens_ += metrics.prompt_tokens;
  output_tokens_ += metrics.output_tokens;
  if (metrics.output_tokens == 0) return;
  ttft_.add(seconds_of(metrics.ttft()));
  e2e_.add(seconds_of(metrics.finish - metrics.arrival));
  if (metrics.output_tokens > 1) tpot_.add(seconds_of(metrics.tpot()));
  for (Time gap : metrics.gaps) itl_.add(seconds_of(gap));
}

std::string ServingMetrics::prometheus(const EngineStats& engine) const {
  std::string out;
  PrometheusPage page("baton_", &out);
  const std::lock_guard lock(mutex_);
  page.histogram("time_to_first_token_seconds", "From arrival to the first token.", ttft_);
  page.histogram("inter_token_latency_seconds", "Between two tokens of a request.", itl_);
  page.histogram("time_per_output_token_seconds", "Mean over a request, first token excluded.",
                 tpot_);
  page.histogram("request_latency_seconds", "From arrival to the last token.", e2e_);
  page.header("requests_total", "Requests that ended, by reason.", "counter");
  for (FinishReason reason :
       {FinishReason::kStop, FinishReason::kLength, FinishReason::kAbort, FinishReason::kError}) {
    page.line("requests_total", PrometheusPage::label("reason", finish_reason_name(reason)),
              finished_[static_cast<size_t>(reason)]);
  }
  page.single("prompt_tokens_total", "Prompt tokens of requests that ended.", "counter",
              prompt_tokens_);
  page.single("output_tokens_total", "Tokens generated.", "counter", output_tokens_);
  page.single("steps_total", "Forward passes.", "counter", engine.steps);
  page.single("tokens_computed_total", "Tokens that went through the model.", "counter",
              engine.tokens_computed);
  page.single("prefix_cached_tokens_total", "Prompt tokens found in the prefix cache.", "counter",
              engine.cached_tokens);
  page.single("kv_loaded_tokens_total", "Prompt tokens whose KV came from a prefill worker.",
              "counter", engine.loaded_tokens);
  page.single("kv_tier_tokens_total", "Prompt tokens whose KV came from the KV tiers.", "counter",
              engine.tier_tokens);
  print_tiers(engine.tiers, &page);
  page.single("kv_loads_failed_total", "KV loads that failed.", "counter", engine.loads_failed);
  page.single("kv_bytes_sent_total", "KV bytes sent to decode workers.", "counter",
              engine.kv_bytes_sent);
  page.single("kv_bytes_loaded_total", "KV bytes received from prefill workers.", "counter",
              engine.kv_bytes_loaded);
  page.single("prefill_jobs_total", "Prompts computed for decode workers.", "counter",
              engine.jobs_finished);
  page.single("preemptions_total", "Sequences that gave their blocks up.", "counter",
              engine.preemptions);
  page.single("requests_waiting", "Requests in the queue.", "gauge", engine.waiting);
  page.single("requests_running", "Requests in the batch.", "gauge", engine.running);
  page.single("requests_loading", "Requests whose KV is arriving.", "gauge", engine.loading);
  page.single("kv_blocks_free", "Free blocks of the KV cache.", "gauge", engine.free_blocks);
  page.single("kv_blocks_cached", "Blocks that a prompt's beginning can be found in.", "gauge",
              engine.cached_blocks);
  page.single("kv_blocks_quarantined", "Blocks that a stopped load may still write to.", "gauge",
              engine.quarantined_blocks);
  return out;
}

std::string worker_metrics(std::span<const NamedWorkerStats> workers) {
  struct Metric {
    const char* name;
    const char* help;
    const char* type;
    uint64_t WorkerStats::*value;
  };
  static constexpr std::array kMetrics = {
      Metric{"worker_peers_up", "Peers that are connected.", "gauge", &WorkerStats::peers_up},
      Metric{"worker_open_transfers", "Transfers that have not ended.", "gauge",
             &WorkerStats::open_transfers},
      Metric{"worker_notifications_waiting", "Notifications that are not read yet.", "gauge",
             &WorkerStats::notifications_waiting},
      Metric{"worker_transfers_total", "Transfers that ended.", "counter",
             &WorkerStats::transfers_ended},
      Metric{"worker_bytes_moved_total", "Bytes of transfers that ended well.", "counter",
             &WorkerStats::bytes_moved},
      Metric{"worker_rails_lost_total", "Rails that were lost while others carried on.", "counter",
             &WorkerStats::rails_lost},
      Metric{"worker_slices_moved_total", "Slices that went over another rail after theirs failed.",
             "counter", &WorkerStats::slices_moved},
      Metric{"worker_peers_lost_total", "Peers all of whose rails were lost at once.", "counter",
             &WorkerStats::peers_lost},
      Metric{"worker_peers_resumed_total", "... and that came back.", "counter",
             &WorkerStats::peers_resumed},
      Metric{"worker_handshakes_refused_total",
             "Callers that did not prove themselves, or found no room.", "counter",
             &WorkerStats::handshakes_refused},
      Metric{"worker_registrations_total",
             "Memory regions registered; does not grow while requests are served.", "counter",
             &WorkerStats::registrations},
      Metric{"worker_staged_bytes_total",
             "Bytes copied between devices and pinned memory of the host.", "counter",
             &WorkerStats::staged_bytes}};
  std::string text;
  if (workers.empty()) return text;
  PrometheusPage page("baton_", &text);
  for (const Metric& metric : kMetrics) {
    page.header(metric.name, metric.help, metric.type);
    for (const NamedWorkerStats& worker : workers) {
      page.line(metric.name, PrometheusPage::label("worker", worker.name),
                worker.stats.*metric.value);
    }
  }
  return text;
}

void ServingMetrics::print_tiers(const kvtransfer::tiers::TierStats& tiers, PrometheusPage* out) {
  PrometheusPage& page = *out;
  page.single("kv_tier_host_bytes", "Host memory that KV tiers use.", "gauge", tiers.host_bytes);
  page.single("kv_tier_host_blocks", "KV blocks in the tier in host memory.", "gauge",
              tiers.host_records);
  page.single("kv_tier_disk_blocks", "KV blocks in the tier on disk.", "gauge", tiers.disk_records);
  page.single("kv_tier_blocks_saved_total", "KV blocks copied to the tiers.", "counter",
              tiers.saved);
  page.single("kv_tier_blocks_dropped_total", "KV blocks that the tiers were too busy for.",
              "counter", tiers.dropped);
  page.single("kv_tier_blocks_evicted_total", "KV blocks that made room for others.", "counter",
              tiers.evicted);
  page.header("kv_tier_blocks_loaded_total", "KV blocks that came back.", "counter");
  for (const auto& [tier, blocks] :
       {std::pair("host", tiers.from_host), {"disk", tiers.from_disk}, {"peer", tiers.from_peer}}) {
    page.line("kv_tier_blocks_loaded_total", PrometheusPage::label("tier", tier), blocks);
  }
  page.single("kv_tier_silences_total", "Times that the KV store did not answer in time.",
              "counter", tiers.silences);
  page.single("kv_tier_blocks_corrupt_total", "KV blocks that were not what had been saved.",
              "counter", tiers.corrupt);
}

}  // namespace baton::engine::serve
