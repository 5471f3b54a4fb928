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
  if (layer.router.n > 0 && shard.expert_parallel && !shard.whole()) {
    return ask_experts_of_ranks(layer, tokens, w);
  }
  if (layer.router.n > 0) return ask_experts(layer, tokens, w);
  // For few tokens, reading the weights dominates, whichever way it is done.
  if (arithmetic == Arithmetic::kBf16 && shard.whole() && layer.gate_up_bias.empty() &&
      tokens >= kGatedTokens && w.bf16_scratch.takes_hidden(own)) {
    feed_forward_bf16(*w.pool, w.bf16_scratch, tokens, w.normed.data(), d,
                      layer.gate_up.view().tiles(), layer.down.view().tiles(), w.x.data(), d);
    if (!layer.down_bias.empty()) {
      for_rows(*w.pool, tokens,
               [&](size_t row) { add_bias(layer.down_bias, w.x.data() + row * d); });
    }
    return absl::OkStatus();
  }
  multiply(w, tokens, w.normed.data(), d, layer.gate_up.view(), w.gate_up.data(), width, false);
  for_rows(*w.pool, tokens, [&](size_t row) {
    float* gate = w.gate_up.data() + row * width;
    add_bias(layer.gate_up_bias, gate);
    swiglu(gate, gate + own, gate, own);
  });
  return add_to_x(w, tokens, w.gate_up.data(), width, config.intermediate_size, layer.down.view(),
                  layer.down_bias);
}

// The router, whole at every rank, decides. Each chosen expert then has its tokens behind one
// another, and is asked once for all of them.
absl::Status Model::Impl::ask_experts(const Layer& layer, int tokens, Workspace::Impl& w) const {
  const size_t d = static_cast<size_t>(config.hidden_size);
  ExpertTable& table = w.experts;
  multiply(w, tokens, w.normed.data(), d, layer.router.view(), table.logits(), table.stride(),
           false);
  for_rows(*w.pool, tokens,
           [&](size_t row, int thread) { table.choose(static_cast<int>(row), thread); });
  table.group(tokens);

  for_rows(*w.pool, table.slots(), [&](size_t slot) {
    const size_t token = static_cast<size_t>(table.slot(static_cast<int>(slot)).token);
    std::copy_n(w.normed.data() + token * d, d, w.expert_rows.data() + slot * d);
  });
  const int own = slice_of(config.expert_size, shard).size();
  const size_t width = 2 * static_cast<size_t>(own);
  multiply_experts(w, table.groups(), w.expert_rows.data(), d, layer.gate_up, w.gate_up.data(),
                   width);
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

  const int columns = of_x().size();
  const size_t part = static_cast<size_t>(columns);
  multiply_experts(w, table.groups(), hidden, stride, layer.down, w.expert_rows.data(), part);
  // The experts' outputs for a token are added up in the place of the first, and then added to the
  // residual stream.
  float* x = w.x.data() + of_x().begin;
  for_rows(*w.pool, tokens, [&](size_t row) {
    const auto says = [&](int number) {
      return w.expert_rows.data() +
             static_cast<size_t>(table.place(static_cast<int>(row), number)) * part;
    };
    const auto weight = [&](int number) {
      return table.slot(table.place(static_cast<int>(row), number)).weight;
    };
    scale(says(0), weight(0), columns);
    for (int i = 1; i < table.per_token(); ++i) add_scaled(says(i), weight(i), says(0), columns);
    add_scaled(says(0), 1.0f, x + row * d, columns);
  });
  return shard.whole() ? absl::OkStatus() : gather(w, tokens, x, d, config.hidden_size, w.x.data());
}

// The same with whole experts at each rank: this rank dispatches its share of the tokens, and
// computes its experts for all ranks.
absl::Status Model::Impl::ask_experts_of_ranks(const Layer& layer, int tokens,
                                               Workspace::Impl& w) const {
  const size_t d = static_cast<size_t>(config.hidden_size);
  ExpertTable& table = w.experts;
  const Slice mine = share_of(tokens, shard);
  const float* const rows = w.normed.data() + static_cast<size_t>(mine.begin) * d;
  if (mine.size() > 0) {
    multiply(w, mine.size(), rows, d, layer.router.view(), table.logits(), table.stride(), false);
  }
  for_rows(*w.pool, mine.size(),
           [&](size_t row, int thread) { table.choose(static_cast<int>(row), thread); });
  w.chosen.clear();
  w.weights.clear();
  for (int token = 0; token < mine.size(); ++token) {
    for (int i = 0; i < table.per_token(); ++i) {
      w.chosen.push_back(table.expert(token, i));
      w.weights.push_back(table.weight(token, i));
    }
  }
  absl::StatusOr<ShardExchange::Asked> asked = w.exchange->ask_experts(rows, mine.size(), w.chosen);
  if (!asked.ok()) return asked.status();
  const int slots = static_cast<int>(asked->rows.size());
  for_rows(*w.pool, slots, [&](size_t slot) {
    std::copy_n(asked->rows[slot], d, w.expert_rows.data() + slot * d);
  });
  w.groups.clear();
  for (const auto& [expert, first, count] : asked->groups) {
    w.groups.push_back({expert, first, count});
  }
  const int own = config.expert_size;
  const size_t width = 2 * static_cast<size_t>(own);
  multiply_experts(w, w.groups, w.expert_rows.data(), d, layer.gate_up, w.gate_up.data(), width);
  for_rows(*w.pool, slots, [&](size_t slot) {
    float* gate = w.gate_up.data() + slot * width;
    swiglu(gate, gate + own, gate, own);
  });
  multiply_experts(w, w.groups, w.gate_up.data(), width, layer.down, asked->answers, d);
  const size_t part = static_cast<size_t>(tokens_of_rank(tokens, shard.ranks)) * d;
  absl::Status status =
      w.exchange->sum_answers(w.weights, w.exchanged + static_cast<size_t>(shard.rank) * part,
                              static_cast<size_t>(mine.size()) * d);
  if (status.ok()) status = w.exchange->all_gather(w.exchanged, part);
  if (!status.ok()) return status;
  for_rows(*w.pool, tokens, [&](size_t row) {
    add_scaled(w.exchanged + row * d, 1.0f, w.x.data() + row * d, config.hidden_size);
  });
  return absl::OkStatus();
}

}  // namespace baton::engine
