// Plain versions of what engine/kernels/ computes, to compare with.
#pragma once

#include "engine/kernels/aligned.h"
#include "engine/kernels/attention.h"
#include "engine/kernels/gemm.h"
#include "tests/std.h"

namespace baton::engine {

// gemm(): one chain of fp32 for each element, in ascending k.
inline void reference_gemm(int m, int n, int k, const MatrixView& a, const MatrixView& b, float* c,
                           size_t ldc, bool accumulate) {
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      float sum = accumulate ? c[i * ldc + j] : 0.0f;
      for (int x = 0; x < k; ++x) {
        sum = std::fma(a.data[i * a.row_stride + x * a.col_stride],
                       b.data[x * b.row_stride + j * b.col_stride], sum);
      }
      c[i * ldc + j] = sum;
    }
  }
}

// gemm_bf16(): B as rows of a weight [n][k].
inline void reference_gemm_bf16(int m, int n, int k, const float* a, size_t lda,
                                const uint16_t* weight, float* c, size_t ldc, bool accumulate) {
  const auto flushed = [](float x) {
    return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x;
  };
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      float sum = accumulate ? flushed(c[size_t(i) * ldc + size_t(j)]) : 0.0f;
      for (int first = 0; first < k; first += 32) {
        float halves[2] = {0.0f, 0.0f};
        for (int x = first; x < first + 32; ++x) {
          const float left =
              x < k ? float_from_bf16(bf16_from_float(a[size_t(i) * lda + size_t(x)])) : 0.0f;
          const float right =
              x < k ? float_from_bf16(weight[size_t(j) * size_t(k) + size_t(x)]) : 0.0f;
          halves[x % 2] = flushed(std::fma(flushed(left), flushed(right), halves[x % 2]));
        }
        sum = flushed(sum + flushed(halves[0] + halves[1]));
      }
      c[size_t(i) * ldc + size_t(j)] = sum;
    }
  }
}

// paged_attention(), in double.
inline void reference_attention(const AttentionCall& call) {
  const int dims = call.cache->geometry().head_dim;
  for (int t = 0; t < call.tokens; ++t) {
    for (int h = 0; h < call.group; ++h) {
      const float* q = call.q + t * call.q_stride + h * dims;
      float* out = call.out + t * call.out_stride + h * dims;
      std::vector<double> p;
      const int first = call.window > 0 ? std::max(0, call.position + t + 1 - call.window) : 0;
      for (int at = first; at <= call.position + t; ++at) {
        const uint32_t block = call.block_table[static_cast<size_t>(at / kBlockTokens)];
        const uint16_t* key = call.cache->key(call.layer, block, call.kv_head) + at % kBlockTokens;
        double score = 0;
        for (int d = 0; d < dims; ++d) score += q[d] * float_from_bf16(key[d * kBlockTokens]);
        p.push_back(score);
      }
      const double maximum = *std::max_element(p.begin(), p.end());
      double sum = 0;
      for (double& x : p) sum += x = std::exp(x - maximum);
      for (int d = 0; d < dims; ++d) {
        double mix = 0;
        for (size_t i = 0; i < p.size(); ++i) {
          const size_t at = size_t(first) + i;
          const uint32_t block = call.block_table[at / kBlockTokens];
          const uint16_t* value = call.cache->value(call.layer, block, call.kv_head);
          mix += p[i] * float_from_bf16(value[(at % kBlockTokens) * dims + d]);
        }
        out[d] = static_cast<float>(mix / sum);
      }
    }
  }
}

inline void reference_rms_norm(const float* x, const float* weight, float* y, int size, float eps) {
  double squares = 0;
  for (int i = 0; i < size; ++i) squares += static_cast<double>(x[i]) * x[i];
  const double factor = 1.0 / std::sqrt(squares / size + eps);
  for (int i = 0; i < size; ++i) y[i] = static_cast<float>(x[i] * factor * weight[i]);
}

inline void reference_softmax(float* x, int size) {
  const double top = *std::max_element(x, x + size);
  double sum = 0;
  for (int i = 0; i < size; ++i) sum += std::exp(x[i] - top);
  for (int i = 0; i < size; ++i) x[i] = static_cast<float>(std::exp(x[i] - top) / sum);
}

inline void reference_swiglu(const float* gate, const float* up, float* out, int size) {
  for (int i = 0; i < size; ++i) {
    out[i] = static_cast<float>(gate[i] / (1.0 + std::exp(-static_cast<double>(gate[i]))) * up[i]);
  }
}

}  // namespace baton::engine
