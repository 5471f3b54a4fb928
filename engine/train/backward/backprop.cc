// The training pass: activations are kept per layer, matrices go through the one gemm.
#include "engine/train/backward/backprop.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "engine/kernels/elementwise.h"
#include "engine/kernels/gemm.h"
#include "engine/model/rope.h"
#include "engine/train/backward/train_kernels.h"

namespace baton::engine::train {
namespace {

constexpr int kNormBlocks = 16;  // partial sums of norm gradients; fixed, so that order is too

struct LayerActivations {
  AlignedArray<float> input;     // [tokens][d], the residual stream coming in
  AlignedArray<float> factor1;   // [tokens], of the input norm
  AlignedArray<float> normed1;   // [tokens][d]
  AlignedArray<float> qkv;       // [tokens][(H + 2 KV) * head_dim], rotated
  AlignedArray<float> weights;   // attention probabilities
  AlignedArray<float> attended;  // [tokens][H * head_dim]
  AlignedArray<float> middle;    // [tokens][d], the stream after attention
  AlignedArray<float> factor2;   // [tokens]
  AlignedArray<float> normed2;   // [tokens][d]
  AlignedArray<float> gate_up;   // [tokens][2 F]
  AlignedArray<float> active;    // [tokens][F]
};

}  // namespace

struct Backprop::Impl {
  Impl(const ParameterMap& parameter_map, int max_tokens, int max_length, ComputePool& compute);

  float run(const float* parameters, std::span<const int32_t> tokens, int sequences, int length,
            float* gradients, const GradientsReady& ready, const ParametersNeeded& needed);
  void forward(const float* parameters, const ParametersNeeded& needed);
  void backward(const float* parameters, float* gradients, const GradientsReady& ready);
  // Calls final(end) whenever all gradients before `end` are.
  template <typename Final>
  void backward_layer(int l, const float* parameters, float* gradients, const Final& final);

  // y [rows][n] = x [rows][k] W^T, or += ; W is `range`.
  void project(const float* x, const ParameterRange& range, const float* parameters, float* y,
               bool add);
  // dx [rows][k] = dy [rows][n] W.
  void project_back(const float* dy, const ParameterRange& range, const float* parameters,
                    float* dx);
  // dW = dy^T x.
  void weight_gradient(const float* dy, const float* x, const ParameterRange& range,
                       float* gradients, bool add);
  void norm(const float* x, const ParameterRange& range, const float* parameters, float* y,
            float* factors);
  void norm_back(const float* x, const ParameterRange& range, const float* parameters,
                 const float* dy, const float* factors, float* dx, float* gradients);
  void rotate(float* qkv, float direction);

  const ParameterMap map;
  const ModelConfig& c;
  ComputePool& pool;
  GemmScratch scratch;
  TrainAttention attention;
  RopeTable table;
  const int d, f, q_width, kv_width, qkv_width;
  int rows = 0;    // tokens of this batch
  int length = 0;  // of a sequence
  std::vector<int32_t> inputs, targets;
  std::vector<LayerActivations> layers;
  AlignedArray<float> last, last_factor, last_normed, logits;  // the stream behind the last layer
  AlignedArray<float> stream, d_stream, d_normed, d_wide, d_active, d_qkv, d_attended;
  AlignedArray<float> packed, norm_parts, row_loss;
};

Backprop::Impl::Impl(const ParameterMap& parameter_map, int max_tokens, int max_length,
                     ComputePool& compute)
    : map(parameter_map),
      c(map.config),
      pool(compute),
      scratch(compute.size()),
      attention(map.config, max_length, compute),
      table(map.config, max_length),
      d(c.hidden_size),
      f(c.intermediate_size),
      q_width(c.num_heads * c.head_dim),
      kv_width(c.num_kv_heads * c.head_dim),
      qkv_width(q_width + 2 * kv_width) {
  const size_t n = static_cast<size_t>(max_tokens);
  const auto array = [n](size_t width) { return AlignedArray<float>(n * width); };
  layers.resize(c.num_layers);
  for (LayerActivations& a : layers) {
    a.input = array(d);
    a.factor1 = array(1);
    a.normed1 = array(d);
    a.qkv = array(qkv_width);
    a.weights = array(static_cast<size_t>(c.num_heads) * max_length);
    a.attended = array(q_width);
    a.middle = array(d);
    a.factor2 = array(1);
    a.normed2 = array(d);
    a.gate_up = array(2 * static_cast<size_t>(f));
    a.active = array(f);
  }
  last = array(d);
  last_factor = array(1);
  last_normed = array(d);
  logits = array(c.vocab_size);
  stream = array(d);
  d_stream = array(d);
  d_normed = array(d);
  d_wide = array(2 * static_cast<size_t>(f));
  d_active = array(f);
  d_qkv = array(qkv_width);
  d_attended = array(q_width);
  row_loss = array(1);
  const int widest = std::max({2 * f, qkv_width, c.vocab_size, d});
  packed =
      AlignedArray<float>(std::max({packed_elements(max_tokens, widest), packed_elements(widest, d),
                                    packed_elements(d, widest), packed_elements(f, d)}));
  norm_parts = AlignedArray<float>(static_cast<size_t>(kNormBlocks) * d);
}

void Backprop::Impl::project(const float* x, const ParameterRange& range, const float* parameters,
                             float* y, bool add) {
  const MatrixView weight{parameters + range.offset, static_cast<size_t>(range.cols)};
  pack_b(pool, range.cols, range.rows, weight.transposed(), packed.data());
  gemm(pool, scratch, rows, {x, static_cast<size_t>(range.cols)},
       {range.cols, range.rows, packed.data(), nullptr, static_cast<size_t>(range.cols)}, y,
       range.rows, add);
}

void Backprop::Impl::project_back(const float* dy, const ParameterRange& range,
                                  const float* parameters, float* dx) {
  const MatrixView weight{parameters + range.offset, static_cast<size_t>(range.cols)};
  pack_b(pool, range.rows, range.cols, weight, packed.data());
  gemm(pool, scratch, rows, {dy, static_cast<size_t>(range.rows)},
       {range.rows, range.cols, packed.data(), nullptr, static_cast<size_t>(range.rows)}, dx,
       range.cols, false);
}

void Backprop::Impl::weight_gradient(const float* dy, const float* x, const ParameterRange& range,
                                     float* gradients, bool add) {
  pack_b(pool, rows, range.cols, {x, static_cast<size_t>(range.cols)}, packed.data());
  const MatrixView outputs{dy, static_cast<size_t>(range.rows)};
  gemm(pool, scratch, range.rows, outputs.transposed(),
       {rows, range.cols, packed.data(), nullptr, static_cast<size_t>(rows)},
       gradients + range.offset, range.cols, add);
}

void Backprop::Impl::norm(const float* x, const ParameterRange& range, const float* parameters,
                          float* y, float* factors) {
  const float eps = static_cast<float>(c.rms_norm_eps);
  pool.parallel_for(rows, [&](int64_t t, int) {
    factors[t] = rms_norm(x + t * d, parameters + range.offset, y + t * d, d, eps);
  });
}

void Backprop::Impl::norm_back(const float* x, const ParameterRange& range, const float* parameters,
                               const float* dy, const float* factors, float* dx, float* gradients) {
  pool.parallel_for(kNormBlocks, [&](int64_t block, int) {
    float* part = norm_parts.data() + block * d;
    std::fill_n(part, d, 0.0f);
    const int64_t end = (block + 1) * rows / kNormBlocks;
    for (int64_t t = block * rows / kNormBlocks; t < end; ++t) {
      rms_norm_backward(x + t * d, parameters + range.offset, dy + t * d, factors[t], dx + t * d,
                        part, d);
    }
  });
  float* out = gradients + range.offset;
  std::fill_n(out, d, 0.0f);
  for (int block = 0; block < kNormBlocks; ++block) {
    const float* part = norm_parts.data() + static_cast<size_t>(block) * d;
    for (int i = 0; i < d; ++i) out[i] += part[i];
  }
}

void Backprop::Impl::rotate(float* qkv, float direction) {
  pool.parallel_for(rows, [&](int64_t t, int) {
    const int position = static_cast<int>(t % length);
    for (int head = 0; head < c.num_heads + c.num_kv_heads; ++head) {
      rope(qkv + t * qkv_width + head * c.head_dim, table.cos(position), table.sin(position),
           c.head_dim, direction);
    }
  });
}

void Backprop::Impl::forward(const float* parameters, const ParametersNeeded& needed) {
  const auto need = [&](size_t begin, size_t end) {
    if (needed) needed(begin, end);
  };
  need(map.embedding.offset, map.embedding.end());
  const float* embedding = parameters + map.embedding.offset;
  pool.parallel_for(rows, [&](int64_t t, int) {
    std::memcpy(stream.data() + t * d, embedding + static_cast<size_t>(inputs[t]) * d,
                d * sizeof(float));
  });
  const size_t stream_bytes = static_cast<size_t>(rows) * d * sizeof(float);
  for (int l = 0; l < c.num_layers; ++l) {
    const LayerParameters& p = map.layers[l];
    LayerActivations& a = layers[l];
    need(p.down.offset, p.input_norm.end());
    std::memcpy(a.input.data(), stream.data(), stream_bytes);
    norm(a.input.data(), p.input_norm, parameters, a.normed1.data(), a.factor1.data());
    project(a.normed1.data(), p.qkv, parameters, a.qkv.data(), false);
    rotate(a.qkv.data(), 1.0f);
    attention.forward(a.qkv.data(), rows / length, length, a.weights.data(), a.attended.data());
    project(a.attended.data(), p.output, parameters, stream.data(), true);
    std::memcpy(a.middle.data(), stream.data(), stream_bytes);
    norm(a.middle.data(), p.post_norm, parameters, a.normed2.data(), a.factor2.data());
    project(a.normed2.data(), p.gate_up, parameters, a.gate_up.data(), false);
    pool.parallel_for(rows, [&](int64_t t, int) {
      const float* gate = a.gate_up.data() + t * 2 * f;
      swiglu(gate, gate + f, a.active.data() + t * f, f);
    });
    project(a.active.data(), p.down, parameters, stream.data(), true);
  }
  need(0, map.final_norm.end());  // and lm_head, unless it is the embedding
  std::memcpy(last.data(), stream.data(), stream_bytes);
  norm(last.data(), map.final_norm, parameters, last_normed.data(), last_factor.data());
  project(last_normed.data(), map.lm_head, parameters, logits.data(), false);
}

template <typename Final>
void Backprop::Impl::backward_layer(int l, const float* parameters, float* gradients,
                                    const Final& final) {
  const LayerParameters& p = map.layers[l];
  const LayerActivations& a = layers[l];
  weight_gradient(d_stream.data(), a.active.data(), p.down, gradients, false);
  final(p.down.end());
  project_back(d_stream.data(), p.down, parameters, d_active.data());
  pool.parallel_for(rows, [&](int64_t t, int) {
    const float* gate = a.gate_up.data() + t * 2 * f;
    float* d_gate = d_wide.data() + t * 2 * f;
    swiglu_backward(gate, gate + f, d_active.data() + t * f, d_gate, d_gate + f, f);
  });
  weight_gradient(d_wide.data(), a.normed2.data(), p.gate_up, gradients, false);
  final(p.gate_up.end());
  project_back(d_wide.data(), p.gate_up, parameters, d_normed.data());
  norm_back(a.middle.data(), p.post_norm, parameters, d_normed.data(), a.factor2.data(),
            d_stream.data(), gradients);

  weight_gradient(d_stream.data(), a.attended.data(), p.output, gradients, false);
  final(p.output.end());
  project_back(d_stream.data(), p.output, parameters, d_attended.data());
  attention.backward(a.qkv.data(), a.weights.data(), d_attended.data(), rows / length, length,
                     d_qkv.data());
  rotate(d_qkv.data(), -1.0f);
  weight_gradient(d_qkv.data(), a.normed1.data(), p.qkv, gradients, false);
  final(p.qkv.end());
  project_back(d_qkv.data(), p.qkv, parameters, d_normed.data());
  norm_back(a.input.data(), p.input_norm, parameters, d_normed.data(), a.factor1.data(),
            d_stream.data(), gradients);
  final(p.input_norm.end());
}

// `logits` holds the gradient of the loss by now.
void Backprop::Impl::backward(const float* parameters, float* gradients,
                              const GradientsReady& ready) {
  size_t done = 0;
  const auto tell = [&](size_t end) {
    if (ready) ready(done, end);
    done = end;
  };
  weight_gradient(logits.data(), last_normed.data(), map.lm_head, gradients, false);
  project_back(logits.data(), map.lm_head, parameters, d_normed.data());
  std::fill_n(d_stream.data(), static_cast<size_t>(rows) * d, 0.0f);
  norm_back(last.data(), map.final_norm, parameters, d_normed.data(), last_factor.data(),
            d_stream.data(), gradients);
  tell(map.final_norm.end());
  for (int l = c.num_layers; l-- > 0;) {
    backward_layer(l, parameters, gradients, tell);
  }
  float* embedding = gradients + map.embedding.offset;
  if (!c.tie_word_embeddings) std::fill_n(embedding, map.embedding.size(), 0.0f);
  // Token order within a column: the same sum however many threads there are.
  constexpr int kColumns = 16;
  pool.parallel_for((d + kColumns - 1) / kColumns, [&](int64_t block, int) {
    const int begin = static_cast<int>(block) * kColumns, end = std::min(d, begin + kColumns);
    for (int t = 0; t < rows; ++t) {
      float* row = embedding + static_cast<size_t>(inputs[t]) * d;
      const float* from = d_stream.data() + static_cast<size_t>(t) * d;
      for (int i = begin; i < end; ++i) row[i] += from[i];
    }
  });
  tell(map.size);
}

float Backprop::Impl::run(const float* parameters, std::span<const int32_t> tokens, int sequences,
                          int sequence_length, float* gradients, const GradientsReady& ready,
                          const ParametersNeeded& needed) {
  length = sequence_length;
  rows = sequences * length;
  inputs.clear();
  targets.clear();
  for (int s = 0; s < sequences; ++s) {
    const auto row = tokens.subspan(static_cast<size_t>(s) * (length + 1), length + 1);
    inputs.insert(inputs.end(), row.begin(), row.end() - 1);
    targets.insert(targets.end(), row.begin() + 1, row.end());
  }
  forward(parameters, needed);
  const float share = 1.0f / static_cast<float>(rows);
  pool.parallel_for(rows, [&](int64_t t, int) {
    row_loss[t] =
        cross_entropy_row(logits.data() + t * c.vocab_size, c.vocab_size, targets[t], share);
  });
  double total = 0;
  for (int t = 0; t < rows; ++t) total += row_loss[t];
  if (gradients != nullptr) backward(parameters, gradients, ready);
  return static_cast<float>(total / rows);
}

Backprop::Backprop(const ParameterMap& map, int max_tokens, int max_length, ComputePool& pool)
    : impl_(std::make_unique<Impl>(map, max_tokens, max_length, pool)) {}
Backprop::~Backprop() = default;

float Backprop::loss_and_gradients(const float* parameters, std::span<const int32_t> tokens,
                                   int sequences, int length, float* gradients,
                                   const GradientsReady& ready, const ParametersNeeded& needed) {
  return impl_->run(parameters, tokens, sequences, length, gradients, ready, needed);
}

float Backprop::loss(const float* parameters, std::span<const int32_t> tokens, int sequences,
                     int length) {
  return impl_->run(parameters, tokens, sequences, length, nullptr, nullptr, nullptr);
}

}  // namespace baton::engine::train
