// Register-only multiply-adds and streaming reads, with the widest vectors there are.
#include "engine/kernels/peaks.h"

#include <algorithm>
#include <atomic>
#include <chrono>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "engine/kernels/peaks.cc"
#include "engine/kernels/simd_targets.h"

#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace baton::engine {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Runs 12 chains, enough to cover the latency of two multiply-add units; returns the operations.
double multiply_add(int64_t iterations, float* sink) {
  const hn::ScalableTag<float> f;
  constexpr int kChains = 12;
  hn::Vec<decltype(f)> sum[kChains];
  BATON_UNROLL
  for (int i = 0; i < kChains; ++i) sum[i] = hn::Set(f, static_cast<float>(i));
  const auto x = hn::Set(f, 0.999f), y = hn::Set(f, 0.001f);
  for (int64_t n = 0; n < iterations; ++n) {
    BATON_UNROLL
    for (int i = 0; i < kChains; ++i) sum[i] = hn::MulAdd(sum[i], x, y);
  }
  BATON_UNROLL
  for (int i = 1; i < kChains; ++i) sum[0] = hn::Add(sum[0], sum[i]);
  *sink = hn::GetLane(sum[0]);
  return 2.0 * static_cast<double>(hn::Lanes(f)) * kChains * static_cast<double>(iterations);
}

// `bytes` is a multiple of 4 vectors.
uint32_t read_all(const uint32_t* data, size_t bytes) {
  const hn::ScalableTag<uint32_t> u;
  const size_t lanes = hn::Lanes(u);
  auto a = hn::Zero(u), b = a, c = a, d = a;
  for (size_t i = 0; i < bytes / sizeof(uint32_t); i += 4 * lanes) {
    a = hn::Xor(a, hn::LoadU(u, data + i));
    b = hn::Xor(b, hn::LoadU(u, data + i + lanes));
    c = hn::Xor(c, hn::LoadU(u, data + i + 2 * lanes));
    d = hn::Xor(d, hn::LoadU(u, data + i + 3 * lanes));
  }
  return hn::GetLane(hn::Xor(hn::Xor(a, b), hn::Xor(c, d)));
}

}  // namespace HWY_NAMESPACE
}  // namespace baton::engine
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace baton::engine {

HWY_EXPORT(multiply_add);
HWY_EXPORT(read_all);

namespace {

constexpr size_t kPiece = size_t{1} << 20;

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

double measure_fma_peak(ComputePool& pool, int64_t iterations) {
  std::atomic<double> operations{0.0};
  const auto start = std::chrono::steady_clock::now();
  pool.parallel_for(pool.size(), [&](int64_t, int) {
    float sink = 0;
    operations.fetch_add(HWY_DYNAMIC_DISPATCH(multiply_add)(iterations, &sink));
    volatile float keep = sink;
    (void)keep;
  });
  return operations.load() / seconds_since(start);
}

double measure_read_bandwidth(ComputePool& pool, std::span<const std::byte> data) {
  const int64_t pieces = static_cast<int64_t>(data.size() / kPiece);
  std::atomic<uint32_t> sink{0};
  const auto start = std::chrono::steady_clock::now();
  pool.parallel_for(pieces, [&](int64_t piece, int) {
    const auto* from = reinterpret_cast<const uint32_t*>(data.data() + size_t(piece) * kPiece);
    sink.fetch_xor(HWY_DYNAMIC_DISPATCH(read_all)(from, kPiece), std::memory_order_relaxed);
  });
  return static_cast<double>(pieces) * static_cast<double>(kPiece) / seconds_since(start);
}

}  // namespace baton::engine
#endif  // HWY_ONCE
