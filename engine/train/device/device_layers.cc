// The launches of a training pass, in the order of the CPU's (engine/train/backward/backprop.cc and
// train_attention.cc).
#include <cmath>

#include "engine/train/device/device_pass.h"

namespace baton::engine::train {
namespace {

using gpudirect::kernels::Causal;
using gpudirect::kernels::GemmF32;

constexpr uint64_t kThreads = 256;
uint64_t blocks_of(uint64_t all, uint64_t each) { return (all + each - 1) / each; }

}  // namespace

DevicePass::Factor DevicePass::transposed(const Factor& factor) {
  const Layout& of = factor.layout;
  return {factor.at, {of.columns, of.rows, of.column_step, of.row_step, of.outer, of.inner}};
}

absl::Status DevicePass::multiply(const Factor& a, const Factor& b, const Target& c,
                                  const float* start, Causal causal) {
  const bool of_heads = causal != Causal::kNone;
  const GemmF32 product{.a = a.at,
                        .b = b.at,
                        .start = start,
                        .c = c.at,
                        .m = a.layout.rows,
                        .n = b.layout.columns,
                        .k = a.layout.columns,
                        .a_row = a.layout.row_step,
                        .a_k = a.layout.column_step,
                        .b_k = b.layout.row_step,
                        .b_column = b.layout.column_step,
                        .ldc = c.layout.row_step,
                        .outer = of_heads ? call_.sequences : 1,
                        .inner = of_heads ? static_cast<uint32_t>(c_.num_kv_heads) : 1,
                        .a_outer = a.layout.outer,
                        .a_inner = a.layout.inner,
                        .b_outer = b.layout.outer,
                        .b_inner = b.layout.inner,
                        .c_outer = c.layout.outer,
                        .c_inner = c.layout.inner,
                        .causal = causal};
  return gpu_.launcher().gemm_f32(product, gpudirect::kernels::gemm_f32_blocks(product),
                                  gpu_.stream());
}

absl::Status DevicePass::project(const float* x, const ParameterRange& range, const float* start,
                                 float* y) {
  const auto rows = static_cast<uint32_t>(range.rows), cols = static_cast<uint32_t>(range.cols);
  const Factor weight{call_.parameters + range.offset, {rows, cols}};
  return multiply({x, {call_.rows, cols}}, transposed(weight), {y, {call_.rows, rows}}, start);
}

absl::Status DevicePass::project_back(const float* dy, const ParameterRange& range, float* dx) {
  const auto rows = static_cast<uint32_t>(range.rows), cols = static_cast<uint32_t>(range.cols);
  const Factor weight{call_.parameters + range.offset, {rows, cols}};
  return multiply({dy, {call_.rows, rows}}, weight, {dx, {call_.rows, cols}});
}

absl::Status DevicePass::weight_gradient(const float* dy, const float* x,
                                         const ParameterRange& range) {
  const auto rows = static_cast<uint32_t>(range.rows), cols = static_cast<uint32_t>(range.cols);
  return multiply(transposed({dy, {call_.rows, rows}}), {x, {call_.rows, cols}},
                  {call_.sums.gradients + range.offset, {rows, cols}});
}

absl::Status DevicePass::norm(const float* x, const ParameterRange& range, float* y,
                              float* factors) {
  return gpu_.launcher().rms_norm({.x = x,
                                   .weight = call_.parameters + range.offset,
                                   .y = y,
                                   .rows = call_.rows,
                                   .size = d_,
                                   .eps = static_cast<float>(c_.rms_norm_eps),
                                   .factors = factors},
                                  gpudirect::kernels::rms_norm_blocks(call_.rows, d_),
                                  gpu_.stream());
}

absl::Status DevicePass::norm_back(const float* x, const ParameterRange& range,
                                   const float* factors, bool fresh) {
  absl::Status status = gpu_.launcher().rms_norm_back({.x = x,
                                                       .weight = call_.parameters + range.offset,
                                                       .dy = scratch_.d_normed,
                                                       .factors = factors,
                                                       .dx = scratch_.d_stream,
                                                       .rows = call_.rows,
                                                       .size = d_,
                                                       .fresh = fresh ? 1u : 0u},
                                                      blocks_of(call_.rows, 16), gpu_.stream());
  if (!status.ok()) return status;
  return gpu_.launcher().rms_norm_weights({.x = x,
                                           .dy = scratch_.d_normed,
                                           .factors = factors,
                                           .dw = call_.sums.gradients + range.offset,
                                           .rows = call_.rows,
                                           .size = d_},
                                          blocks_of(d_, 16), gpu_.stream());
}

absl::Status DevicePass::rotate(float* qkv, float direction) {
  const auto heads = static_cast<uint32_t>(c_.num_heads + c_.num_kv_heads);
  const auto dim = static_cast<uint32_t>(c_.head_dim);
  return gpu_.launcher().rope_rows({.x = qkv,
                                    .cos = scratch_.cos,
                                    .sin = scratch_.sin,
                                    .rows = call_.rows,
                                    .heads = heads,
                                    .head_dim = dim,
                                    .stride = qkv_width_,
                                    .length = call_.length,
                                    .direction = direction},
                                   blocks_of(uint64_t{call_.rows} * heads * dim / 2, kThreads),
                                   gpu_.stream());
}

absl::Status DevicePass::add(size_t begin, size_t end, const float* source, float* target) {
  gpudirect::kernels::ReduceSum sum{
      .target = target + begin, .count = end - begin, .source_count = 2};
  sum.sources[0] = target + begin;
  sum.sources[1] = source + begin;
  return gpu_.launcher().reduce_sum(sum, blocks_of(end - begin, 4 * kThreads), gpu_.stream());
}

DevicePass::Target DevicePass::in_qkv(float* qkv, uint32_t first, uint32_t heads) const {
  const uint32_t n = call_.length;
  return {qkv + first, {n, dim_, qkv_width_, 1, uint64_t{n} * qkv_width_, uint64_t{heads} * dim_}};
}

DevicePass::Target DevicePass::in_attended(float* attended, uint32_t g) const {
  const uint32_t n = call_.length;
  return {attended + g * dim_,
          {n, dim_, q_width_, 1, uint64_t{n} * q_width_, uint64_t{group_} * dim_}};
}

DevicePass::Target DevicePass::in_weights(float* weights, uint32_t g) const {
  const uint32_t n = call_.length;
  const uint64_t square = uint64_t{n} * n;
  return {weights + g * square,
          {n, n, n, 1, static_cast<uint64_t>(c_.num_heads) * square, group_ * square}};
}

// Query heads that share a KV head are one product after another: their gradients add up in it.
absl::Status DevicePass::attend(const Layer& layer) {
  absl::Status status;
  for (uint32_t g = 0; g < group_ && status.ok(); ++g) {
    status = multiply(query(layer.qkv, g), transposed(key(layer.qkv)), in_weights(layer.weights, g),
                      nullptr, Causal::kBelow);
  }
  if (!status.ok()) return status;
  const auto heads = static_cast<uint32_t>(c_.num_heads);
  status =
      gpu_.launcher().causal_softmax({.scores = layer.weights,
                                      .matrices = call_.sequences * heads,
                                      .length = call_.length,
                                      .scaling = 1.0f / std::sqrt(static_cast<float>(c_.head_dim))},
                                     blocks_of(uint64_t{call_.rows} * heads, 16), gpu_.stream());
  for (uint32_t g = 0; g < group_ && status.ok(); ++g) {
    status = multiply(in_weights(layer.weights, g), value(layer.qkv),
                      in_attended(layer.attended, g), nullptr, Causal::kUntil);
  }
  return status;
}

absl::Status DevicePass::attend_back(const Layer& layer) {
  const Scratch& s = scratch_;
  absl::Status status;
  // dP = dO V^T, then dS in its place.
  for (uint32_t g = 0; g < group_ && status.ok(); ++g) {
    status = multiply(in_attended(s.d_attended, g), transposed(value(layer.qkv)),
                      in_weights(s.d_weights, g), nullptr, Causal::kBelow);
  }
  if (!status.ok()) return status;
  const auto heads = static_cast<uint32_t>(c_.num_heads);
  status = gpu_.launcher().causal_softmax_back(
      {.weights = layer.weights,
       .gradients = s.d_weights,
       .matrices = call_.sequences * heads,
       .length = call_.length,
       .scaling = 1.0f / std::sqrt(static_cast<float>(c_.head_dim))},
      blocks_of(uint64_t{call_.rows} * heads, 16), gpu_.stream());
  // dQ = dS K; dV += P^T dO; dK += dS^T Q.
  const Target d_key = key(s.d_qkv), d_value = value(s.d_qkv);
  for (uint32_t g = 0; g < group_ && status.ok(); ++g) {
    const Target d_scores = in_weights(s.d_weights, g);
    status = multiply(d_scores, key(layer.qkv), query(s.d_qkv, g), nullptr, Causal::kUntil);
    if (!status.ok()) return status;
    status = multiply(transposed(in_weights(layer.weights, g)), in_attended(s.d_attended, g),
                      d_value, g == 0 ? nullptr : d_value.at, Causal::kFrom);
    if (!status.ok()) return status;
    status = multiply(transposed(d_scores), query(layer.qkv, g), d_key, g == 0 ? nullptr : d_key.at,
                      Causal::kFrom);
  }
  return status;
}

absl::Status DevicePass::forward_layer(int l) {
  const LayerParameters& p = map_.layers[static_cast<size_t>(l)];
  const Layer& a = scratch_.layers[static_cast<size_t>(l)];
  float* const out =
      l + 1 < c_.num_layers ? scratch_.layers[static_cast<size_t>(l) + 1].input : scratch_.last;
  absl::Status status = norm(a.input, p.input_norm, a.normed1, a.factor1);
  if (status.ok()) status = project(a.normed1, p.qkv, nullptr, a.qkv);
  if (status.ok()) status = rotate(a.qkv, 1.0f);
  if (status.ok()) status = attend(a);
  if (status.ok()) status = project(a.attended, p.output, a.input, a.middle);
  if (status.ok()) status = norm(a.middle, p.post_norm, a.normed2, a.factor2);
  if (status.ok()) status = project(a.normed2, p.gate_up, nullptr, a.gate_up);
  if (status.ok()) {
    status = gpu_.launcher().swiglu(
        {.gate_up = a.gate_up, .out = a.active, .rows = call_.rows, .size = f_},
        blocks_of(uint64_t{call_.rows} * f_, kThreads), gpu_.stream());
  }
  return status.ok() ? project(a.active, p.down, a.middle, out) : status;
}

absl::Status DevicePass::forward(const ParametersNeeded& needed) {
  const auto need = [&](size_t begin, size_t end) {
    if (needed) needed(begin, end);
  };
  need(map_.embedding.offset, map_.embedding.end());
  absl::Status status =
      gpu_.launcher().gather_rows({.table = call_.parameters + map_.embedding.offset,
                                   .rows = there_.tokens,
                                   .out = scratch_.layers[0].input,
                                   .count = call_.rows,
                                   .size = d_},
                                  call_.rows, gpu_.stream());
  for (int l = 0; l < c_.num_layers && status.ok(); ++l) {
    const LayerParameters& p = map_.layers[static_cast<size_t>(l)];
    need(p.down.offset, p.input_norm.end());
    status = forward_layer(l);
  }
  if (!status.ok()) return status;
  need(0, map_.final_norm.end());  // and lm_head, unless it is the embedding
  status = norm(scratch_.last, map_.final_norm, scratch_.last_normed, scratch_.last_factor);
  if (!status.ok()) return status;
  return project(scratch_.last_normed, map_.lm_head, nullptr, scratch_.logits);
}

absl::Status DevicePass::classify() {
  auto* const losses = gpudirect::pointer_of<float>(pinned_losses_->address());
  return gpu_.launcher().classifier({.logits = scratch_.logits,
                                     .targets = there_.targets,
                                     .sums = losses,
                                     .margins = losses + max_tokens_,
                                     .rows = call_.rows,
                                     .size = static_cast<uint32_t>(c_.vocab_size),
                                     .scale = 1.0f / static_cast<float>(call_.rows)},
                                    call_.rows, gpu_.stream());
}

absl::Status DevicePass::backward_layer(int l) {
  const LayerParameters& p = map_.layers[static_cast<size_t>(l)];
  const Layer& a = scratch_.layers[static_cast<size_t>(l)];
  const Scratch& s = scratch_;
  absl::Status status = weight_gradient(s.d_stream, a.active, p.down);
  if (status.ok()) status = finish_range(p.down.end());
  if (status.ok()) status = project_back(s.d_stream, p.down, s.d_active);
  if (status.ok()) {
    status =
        gpu_.launcher().swiglu_back({.gate_up = a.gate_up,
                                     .d_out = s.d_active,
                                     .d_gate_up = s.d_wide,
                                     .rows = call_.rows,
                                     .size = f_},
                                    blocks_of(uint64_t{call_.rows} * f_, kThreads), gpu_.stream());
  }
  if (status.ok()) status = weight_gradient(s.d_wide, a.normed2, p.gate_up);
  if (status.ok()) status = finish_range(p.gate_up.end());
  if (status.ok()) status = project_back(s.d_wide, p.gate_up, s.d_normed);
  if (status.ok()) status = norm_back(a.middle, p.post_norm, a.factor2, false);

  if (status.ok()) status = weight_gradient(s.d_stream, a.attended, p.output);
  if (status.ok()) status = finish_range(p.output.end());
  if (status.ok()) status = project_back(s.d_stream, p.output, s.d_attended);
  if (status.ok()) status = attend_back(a);
  if (status.ok()) status = rotate(s.d_qkv, -1.0f);
  if (status.ok()) status = weight_gradient(s.d_qkv, a.normed1, p.qkv);
  if (status.ok()) status = finish_range(p.qkv.end());
  if (status.ok()) status = project_back(s.d_qkv, p.qkv, s.d_normed);
  if (status.ok()) status = norm_back(a.input, p.input_norm, a.factor1, false);
  return status.ok() ? finish_range(p.input_norm.end()) : status;
}

// `logits` holds the gradient of the loss by now.
absl::Status DevicePass::backward() {
  const Scratch& s = scratch_;
  absl::Status status = weight_gradient(s.logits, s.last_normed, map_.lm_head);
  if (status.ok()) status = project_back(s.logits, map_.lm_head, s.d_normed);
  if (status.ok()) status = norm_back(s.last, map_.final_norm, s.last_factor, true);
  if (status.ok()) status = finish_range(map_.final_norm.end());
  for (int l = c_.num_layers; l-- > 0 && status.ok();) status = backward_layer(l);
  if (!status.ok()) return status;
  const auto vocab = static_cast<uint32_t>(c_.vocab_size);
  status = gpu_.launcher().add_rows({.table = call_.sums.gradients + map_.embedding.offset,
                                     .from = s.d_stream,
                                     .begins = there_.begins,
                                     .order = there_.order,
                                     .count = vocab,
                                     .size = d_,
                                     .fresh = c_.tie_word_embeddings ? 0u : 1u},
                                    vocab, gpu_.stream());
  return status.ok() ? finish_range(map_.size) : status;
}

}  // namespace baton::engine::train
