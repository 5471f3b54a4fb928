// What a server counts: latency histograms and gauges in Prometheus' text format, and percentiles.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "engine/serve/engine.h"
#include "engine/serve/requests/request.h"

namespace baton::engine::serve {

// The p-th percentile (0..100) with linear interpolation, as numpy's; 0 of nothing.
double percentile(std::vector<double> values, double p);

// Thread-safe.
class ServingMetrics {
 public:
  void observe(const RequestMetrics& metrics, FinishReason reason);
  // The whole page for /metrics; names start with baton_, and with vllm: where vLLM has the like.
  std::string prometheus(const EngineStats& engine,
                         const kvtransfer::KvConnectorStats& connector) const;

 private:
  static constexpr std::array<double, 14> kBounds = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1,
                                                     0.25,  0.5,    1,     2.5,  5,     10,   60};
  struct Histogram {
    std::array<uint64_t, kBounds.size() + 1> counts{};
    double sum = 0;
    void add(Time value);
    void print(std::string_view name, std::string_view help, std::string* out,
               std::string_view prefix = "baton_") const;
  };
  static void print_tiers(const kvtransfer::tiers::TierStats& tiers, std::string* out);
  void print_as_vllm(const EngineStats& engine, std::string* out) const;

  mutable std::mutex mutex_;
  Histogram ttft_, itl_, tpot_, e2e_;
  std::array<uint64_t, 4> finished_{};  // by FinishReason
  uint64_t prompt_tokens_ = 0;
  uint64_t output_tokens_ = 0;
};

}  // namespace baton::engine::serve
