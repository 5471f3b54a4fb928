// A histogram of latencies: buckets by the leading bits of a value.
#include "bench/perftest/perf_histogram.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace baton::bench {
namespace {

constexpr int kBits = 7;  // of precision below the leading one
constexpr size_t kPerOctave = size_t{1} << kBits;
constexpr size_t kBuckets = kPerOctave * (64 - kBits + 1);

// Values below 2^(kBits + 1) have a bucket each; above, kPerOctave buckets to a power of two.
int shift_of(uint64_t value) {
  return std::max(0, static_cast<int>(std::bit_width(value)) - kBits - 1);
}
size_t bucket_of(uint64_t value) {
  const int shift = shift_of(value);
  return static_cast<size_t>(shift) * kPerOctave + static_cast<size_t>(value >> shift);
}
// The middle of a bucket.
uint64_t middle_of(size_t bucket) {
  if (bucket < 2 * kPerOctave) return bucket;
  const size_t shift = bucket / kPerOctave - 1;
  const uint64_t low = (uint64_t{kPerOctave} + bucket % kPerOctave) << shift;
  return low + ((uint64_t{1} << shift) - 1) / 2;
}

double to_us(double ns) { return ns * 1e-3; }

}  // namespace

Histogram::Histogram() : buckets_(kBuckets) {}

void Histogram::record(Time value) {
  const int64_t ns = std::max<int64_t>(0, value.count());
  ++buckets_[bucket_of(static_cast<uint64_t>(ns))];
  ++count_;
  min_ = std::min(min_, ns);
  max_ = std::max(max_, ns);
  const double distance = static_cast<double>(ns) - mean_;
  mean_ += distance / static_cast<double>(count_);
  squares_ += distance * (static_cast<double>(ns) - mean_);
}

void Histogram::clear() { *this = Histogram(); }

double Histogram::mean_us() const { return to_us(mean_); }

double Histogram::stdev_us() const {
  return count_ == 0 ? 0 : to_us(std::sqrt(squares_ / static_cast<double>(count_)));
}

Time Histogram::quantile(double q) const {
  if (count_ == 0) return Time(0);
  const double wanted = std::ceil(std::clamp(q, 0.0, 1.0) * static_cast<double>(count_));
  const uint64_t rank = std::clamp<uint64_t>(static_cast<uint64_t>(wanted), 1, count_);
  uint64_t seen = 0;
  for (size_t i = 0; i < buckets_.size(); ++i) {
    seen += buckets_[i];
    if (seen < rank) continue;
    if (rank == count_) return Time(max_);
    return Time(std::clamp(static_cast<int64_t>(middle_of(i)), min_, max_));
  }
  return Time(max_);
}

double Histogram::quantile_us(double q) const {
  return to_us(static_cast<double>(quantile(q).count()));
}

Latency Histogram::summary() const {
  return {.p50 = quantile_us(0.5),
          .p90 = quantile_us(0.9),
          .p99 = quantile_us(0.99),
          .p999 = quantile_us(0.999),
          .max = quantile_us(1)};
}

}  // namespace baton::bench
