// Attention for training, as matrix products per head.

#include <algorithm>
#include <cmath>

#include "engine/kernels/elementwise.h"
#include "engine/train/backward/train_kernels.h"

namespace baton::engine::train {
namespace {

constexpr int kRows = 64;  // query rows handled together

int round_up(int n, int unit) { return (n + unit - 1) / unit * unit; }

}  // namespace

TrainAttention::TrainAttention(const ModelConfig& config, int max_length, ComputePool& pool)
    : config_(config), pool_(pool), gemm_scratch_(pool.size()), scratch_(pool.size()) {
  const int length = round_up(max_length, kRows), hd = config.head_dim;
  for (Scratch& s : scratch_) {
    s.packed_a = AlignedArray<float>(packed_elements(hd, length));
    s.packed_b = AlignedArray<float>(packed_elements(length, hd));
    s.packed_c = AlignedArray<float>(packed_elements(kRows, hd));
    s.block = AlignedArray<float>(static_cast<size_t>(kRows) * length);
  }
}

void TrainAttention::forward(const float* qkv, int sequences, int length, float* weights,
                             float* out) {
  const int hd = config_.head_dim, group = config_.num_heads / config_.num_kv_heads;
  const int q_width = config_.num_heads * hd, kv_width = config_.num_kv_heads * hd;
  const size_t stride = static_cast<size_t>(q_width) + 2 * kv_width;
  const float scaling = 1.0f / std::sqrt(static_cast<float>(hd));
  const size_t n = static_cast<size_t>(length);
  pool_.parallel_for(sequences * config_.num_kv_heads, [&](int64_t task, int thread) {
    const int64_t sequence = task / config_.num_kv_heads;
    const int kv = static_cast<int>(task % config_.num_kv_heads);
    Scratch& s = scratch_[thread];
    const float* rows = qkv + sequence * length * stride;
    const MatrixView k{rows + q_width + kv * hd, stride};
    const MatrixView v{rows + q_width + kv_width + kv * hd, stride};
    pack_b_serial(hd, length, k.transposed(), s.packed_a.data());
    pack_b_serial(length, hd, v, s.packed_b.data());
    for (int g = 0; g < group; ++g) {
      const int head = kv * group + g;
      float* p = weights + (sequence * config_.num_heads + head) * n * n;
      for (int r = 0; r < length; r += kRows) {
        const int count = std::min(kRows, length - r), seen = r + count;
        float* block = p + r * n;
        gemm_serial(gemm_scratch_, thread, count, {rows + r * stride + head * hd, stride},
                    {hd, seen, s.packed_a.data(), nullptr, static_cast<size_t>(hd)}, block, n,
                    false);
        for (int i = 0; i < count; ++i) {
          scale(block + i * n, scaling, round_up(seen, 16));
          softmax_row(block + i * n, r + i + 1, round_up(seen, 16));
        }
        gemm_serial(gemm_scratch_, thread, count, {block, n},
                    {seen, hd, s.packed_b.data(), nullptr, n},
                    out + (sequence * length + r) * q_width + head * hd, q_width, false);
      }
    }
  });
}

void TrainAttention::backward(const float* qkv, const float* weights, const float* d_out,
                              int sequences, int length, float* d_qkv) {
  const int hd = config_.head_dim, group = config_.num_heads / config_.num_kv_heads;
  const int q_width = config_.num_heads * hd, kv_width = config_.num_kv_heads * hd;
  const size_t stride = static_cast<size_t>(q_width) + 2 * kv_width;
  const float scaling = 1.0f / std::sqrt(static_cast<float>(hd));
  const size_t n = static_cast<size_t>(length);
  pool_.parallel_for(sequences * config_.num_kv_heads, [&](int64_t task, int thread) {
    const int64_t sequence = task / config_.num_kv_heads;
    const int kv = static_cast<int>(task % config_.num_kv_heads);
    Scratch& s = scratch_[thread];
    const float* rows = qkv + sequence * length * stride;
    float* d_rows = d_qkv + sequence * length * stride;
    const MatrixView k{rows + q_width + kv * hd, stride};
    const MatrixView v{rows + q_width + kv_width + kv * hd, stride};
    float* d_k = d_rows + q_width + kv * hd;
    float* d_v = d_rows + q_width + kv_width + kv * hd;
    for (int t = 0; t < length; ++t) {
      std::fill_n(d_k + t * stride, hd, 0.0f);
      std::fill_n(d_v + t * stride, hd, 0.0f);
    }
    pack_b_serial(hd, length, v.transposed(), s.packed_a.data());
    pack_b_serial(length, hd, k, s.packed_b.data());
    for (int g = 0; g < group; ++g) {
      const int head = kv * group + g;
      const float* p = weights + (sequence * config_.num_heads + head) * n * n;
      for (int r = 0; r < length; r += kRows) {
        const int count = std::min(kRows, length - r), seen = r + count;
        const float* block = p + r * n;
        const MatrixView d_o{d_out + (sequence * length + r) * q_width + head * hd,
                             static_cast<size_t>(q_width)};
        const MatrixView q{rows + r * stride + head * hd, stride};
        const MatrixView ds{s.block.data(), n};
        // dP = dO V^T, then dS in its place.
        gemm_serial(gemm_scratch_, thread, count, d_o,
                    {hd, seen, s.packed_a.data(), nullptr, static_cast<size_t>(hd)}, s.block.data(),
                    n, false);
        for (int i = 0; i < count; ++i) {
          float* row = s.block.data() + i * n;
          for (int j = seen; j < round_up(seen, 16); ++j) row[j] = 0.0f;
          softmax_backward_row(block + i * n, row, round_up(seen, 16));
          scale(row, scaling, round_up(seen, 16));
        }
        gemm_serial(gemm_scratch_, thread, count, ds, {seen, hd, s.packed_b.data(), nullptr, n},
                    d_rows + r * stride + head * hd, stride, false);
        pack_b_serial(count, hd, d_o, s.packed_c.data());
        gemm_serial(gemm_scratch_, thread, seen, MatrixView{block, n}.transposed(),
                    {count, hd, s.packed_c.data(), nullptr, static_cast<size_t>(count)}, d_v,
                    stride, true);
        pack_b_serial(count, hd, q, s.packed_c.data());
        gemm_serial(gemm_scratch_, thread, seen, ds.transposed(),
                    {count, hd, s.packed_c.data(), nullptr, static_cast<size_t>(count)}, d_k,
                    stride, true);
      }
    }
  });
}

}  // namespace baton::engine::train
