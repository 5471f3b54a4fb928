// What a server counts: latency histograms and gauges in Prometheus' text format, and percentiles.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/serve/engine.h"
#include "engine/serve/prometheus_text.h"
#include "engine/serve/requests/request.h"
#include "transport/worker.h"

namespace baton::engine::serve {

// The p-th percentile (0..100) with linear interpolation, as numpy's; 0 of nothing.
double percentile(std::vector<double> values, double p);

// A worker of Baton's that moves the engine's KV.
struct NamedWorkerStats {
  const char* name;
  WorkerStats stats;
};
// Their part of /metrics, with their names as a label.
std::string worker_metrics(std::span<const NamedWorkerStats> workers);

// Thread-safe.
class ServingMetrics {
 public:
  void observe(const RequestMetrics& metrics, FinishReason reason);
  // The whole page for /metrics; names start with baton_.
  std::string prometheus(const EngineStats& engine) const;

 private:
  static constexpr std::array<double, 14> kBounds = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1,
                                                     0.25,  0.5,    1,     2.5,  5,     10,   60};
  static void print_tiers(const kvtransfer::tiers::TierStats& tiers, PrometheusPage* out);

  mutable std::mutex mutex_;
  // In seconds, of requests that had a token.
  Histogram ttft_{kBounds}, itl_{kBounds}, tpot_{kBounds}, e2e_{kBounds};
  std::array<uint64_t, 4> finished_{};  // by FinishReason
  uint64_t prompt_tokens_ = 0;
  uint64_t output_tokens_ = 0;
};

}  // namespace baton::engine::serve
