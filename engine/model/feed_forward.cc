// The second half of a layer: one block for all tokens, or experts.
#include <algorithm>

#include "engine/kernels/elementwise.h"
#include "engine/model/model_impl.h"

namespace baton::engine {

absl::Status Model::Impl::feed_forward(const Layer& layer, int tokens, Workspace::Impl& w) const {
  const size_t d = static_cast<size_t>(config.hidden_size);
  const int own = slice_of(config.intermediate_size, shard).size();
  const size_t width = 2 * static_cast<size_t>(own);
  for_rows(*w.pool, tokens, [&](size_t row) {
    rms_norm(w.x.data() + row * d, layer.post_norm.data(), w.normed.data() + row * d,
             config.hidden_size, static_cast<float>(config.rms_norm_eps));
  });
  if (layer.router.n > 0) return ask_experts(layer, tokens, w);
  multiply(w, tokens, w.normed.data(), d, layer.gate_up.view(), w.gate_up.data(), width, false);
  for_rows(*w.pool, tokens, [&](size_t row) {
    float* gate = w.gate_up.data() + row * width;
    add_bias(layer.gate_up_bias, gate);
    swiglu(gate, gate + own, gate, own);
  });
  return add_to_x(w, tokens, w.gate_up.data(), width, config.intermediate_size, layer.down.view(),
                  layer.down_bias);
}

// The router, whole at every rank, decides. Each chosen expert then sees its tokens as one batch.
absl::Status Model::Impl::ask_experts(const Layer& layer, int tokens, Workspace::Impl& w) const {
  const size_t d = static_cast<size_t>(config.hidden_size);
  ExpertTable& table = w.experts;
  multiply(w, tokens, w.normed.data(), d, layer.router.view(), table.logits(), table.stride(),
           false);
  for_rows(*w.pool, tokens,
           [&](size_t row, int thread) { table.choose(static_cast<int>(row), thread); });
  table.group(tokens);

  const int own = slice_of(config.expert_size, shard).size();
  const size_t width = 2 * static_cast<size_t>(own);
  for (const ExpertTable::Group& group : table.groups()) {
    for_rows(*w.pool, group.count, [&](size_t row) {
      const int token = table.slot(group.first + static_cast<int>(row)).token;
      std::copy_n(w.normed.data() + static_cast<size_t>(token) * d, d,
                  w.expert_rows.data() + row * d);
    });
    multiply(w, group.count, w.expert_rows.data(), d, layer.gate_up.view(group.expert),
             w.gate_up.data() + static_cast<size_t>(group.first) * width, width, false);
  }
  for_rows(*w.pool, table.slots(), [&](size_t slot) {
    float* gate = w.gate_up.data() + slot * width;
    swiglu(gate, gate + own, gate, own);
  });
  const float* hidden = w.gate_up.data();
  size_t stride = width;
  if (!shard.whole()) {
    absl::Status status =
        gather(w, table.slots(), hidden, width, config.expert_size, w.gathered.data());
    if (!status.ok()) return status;
    hidden = w.gathered.data();
    stride = static_cast<size_t>(config.expert_size);
  }

  // What the experts say of a token is added up from zero, then to the residual stream.
  const int columns = of_x().size();
  const size_t part = static_cast<size_t>(columns);
  std::fill_n(w.expert_sums.data(), static_cast<size_t>(tokens) * part, 0.0f);
  for (const ExpertTable::Group& group : table.groups()) {
    multiply(w, group.count, hidden + static_cast<size_t>(group.first) * stride, stride,
             layer.down.view(group.expert), w.expert_rows.data(), part, false);
    for_rows(*w.pool, group.count, [&](size_t row) {
      const ExpertTable::Slot& slot = table.slot(group.first + static_cast<int>(row));
      add_scaled(w.expert_rows.data() + row * part, slot.weight,
                 w.expert_sums.data() + static_cast<size_t>(slot.token) * part, columns);
    });
  }
  float* x = w.x.data() + of_x().begin;
  for_rows(*w.pool, tokens, [&](size_t row) {
    add_scaled(w.expert_sums.data() + row * part, 1.0f, x + row * d, columns);
  });
  return shard.whole() ? absl::OkStatus() : gather(w, tokens, x, d, config.hidden_size, w.x.data());
}

}  // namespace baton::engine
