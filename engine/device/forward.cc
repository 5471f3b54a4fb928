// A step as launches on one stream.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "engine/device/device_model.h"

namespace baton::engine::device {
namespace {

using gpudirect::Device;
using gpudirect::kernels::CacheLayer;

uint64_t pieces(uint64_t all, uint64_t each) { return (all + each - 1) / each; }

}  // namespace

absl::Status DeviceModel::norm(const float* x, const float* weight, float* y, uint32_t rows,
                               int size) {
  return gpu_->launcher().rms_norm(
      {.x = x,
       .weight = weight,
       .y = y,
       .rows = rows,
       .size = static_cast<uint32_t>(size),
       .eps = static_cast<float>(config_.rms_norm_eps)},
      gpudirect::kernels::rms_norm_blocks(rows, static_cast<uint32_t>(size)), gpu_->stream());
}

absl::Status DeviceModel::multiply(const float* a, uint32_t rows, int k, const uint16_t* w, int n,
                                   const float* bias, float* c, bool accumulate) {
  const gpudirect::kernels::Gemm product{.a = a,
                                         .w = w,
                                         .bias = bias,
                                         .c = c,
                                         .m = rows,
                                         .n = static_cast<uint32_t>(n),
                                         .k = static_cast<uint32_t>(k),
                                         .lda = static_cast<uint32_t>(k),
                                         .ldc = static_cast<uint32_t>(n),
                                         .accumulate = accumulate ? 1u : 0u};
  if (products_ != nullptr) return products_->multiply(product);
  return gpu_->launcher().multiply(product, gpu_->stream());
}

CacheLayer DeviceModel::cache_layer(int l, const KvCache& cache) const {
  return {.base = cache.key(l, 0, 0),
          .kv_heads = static_cast<uint32_t>(config_.num_kv_heads),
          .head_dim = static_cast<uint32_t>(config_.head_dim)};
}

absl::Status DeviceModel::project_qkv(const DeviceLayer& layer) {
  const uint32_t tokens = inputs_.tokens;
  const int d = config_.hidden_size, dim = config_.head_dim;
  const int heads = config_.num_heads, kv_heads = config_.num_kv_heads;
  Scratch& s = scratch_;
  absl::Status status = norm(s.x, layer.input_norm, s.normed, tokens, d);
  const auto project = [&](const uint16_t* w, const float* bias, int columns, float* to) {
    if (status.ok()) status = multiply(s.normed, tokens, d, w, columns, bias, to, false);
  };
  project(layer.query, layer.query_bias, heads * dim, s.q);
  project(layer.key, layer.key_bias, kv_heads * dim, s.k);
  project(layer.value, layer.value_bias, kv_heads * dim, s.v);
  if (layer.query_norm == nullptr) return status;
  // Each head is a row.
  const auto of_heads = [&](float* rows, const float* weight, int count) {
    if (!status.ok()) return;
    status = norm(rows, weight, rows, tokens * static_cast<uint32_t>(count), dim);
  };
  of_heads(s.q, layer.query_norm, heads);
  of_heads(s.k, layer.key_norm, kv_heads);
  return status;
}

absl::Status DeviceModel::store(int l, const KvCache& cache) {
  const auto heads = static_cast<uint32_t>(config_.num_heads);
  const auto kv_heads = static_cast<uint32_t>(config_.num_kv_heads);
  return gpu_->launcher().rope_store(
      {.q = scratch_.q,
       .k = scratch_.k,
       .v = scratch_.v,
       .cos = scratch_.cos,
       .sin = scratch_.sin,
       .slots = inputs_.slots,
       .cache = cache_layer(l, cache),
       .tokens = inputs_.tokens,
       .heads = heads,
       .positions = inputs_.positions,
       .q_scale = 1.0f / std::sqrt(static_cast<float>(config_.head_dim))},
      uint64_t{inputs_.tokens} * (heads + kv_heads), gpu_->stream());
}

// Behind what is on the stream stands a word of it, if any caller wants to know.
absl::Status DeviceModel::mark_written(int l) {
  if (!tells_) return absl::OkStatus();
  return tickets_->mark(gpu_->stream(), static_cast<uint32_t>(l));
}

absl::Status DeviceModel::attend(int l, const KvCache& cache) {
  const auto kv_heads = static_cast<uint32_t>(config_.num_kv_heads);
  const auto group = static_cast<uint32_t>(config_.num_heads / config_.num_kv_heads);
  const auto window = static_cast<uint32_t>(config_.window(l));
  absl::Status status;
  if (inputs_.task_count > 0) {
    status = gpu_->launcher().attend_pages({.q = scratch_.q,
                                            .out = scratch_.attended,
                                            .block_tables = inputs_.tables,
                                            .tasks = inputs_.tasks,
                                            .cache = cache_layer(l, cache),
                                            .task_count = inputs_.task_count,
                                            .group = group,
                                            .window = window},
                                           uint64_t{inputs_.task_count} * kv_heads, gpu_->stream());
  }
  if (!status.ok() || inputs_.split_task_count == 0) return status;
  const gpudirect::kernels::SplitAttention splits{.q = scratch_.q,
                                                  .out = scratch_.attended,
                                                  .block_tables = inputs_.tables,
                                                  .tasks = inputs_.split_tasks,
                                                  .items = inputs_.items,
                                                  .counts = inputs_.counts,
                                                  .partial = scratch_.partial,
                                                  .cache = cache_layer(l, cache),
                                                  .group = group,
                                                  .window = window};
  // Also for the items of later steps, which a graph of this one computes.
  const uint64_t items = comes_again_ ? most_splits_ : inputs_.item_count;
  status = gpu_->launcher().attend(splits, items * kv_heads, gpu_->stream());
  if (!status.ok() || !inputs_.joins) return status;
  const uint32_t queries = std::min(group, gpudirect::kernels::kTaskQueries);
  return gpu_->launcher().join_splits(
      splits, uint64_t{inputs_.split_task_count} * kv_heads * queries, gpu_->stream());
}

absl::Status DeviceModel::feed_forward(const DeviceLayer& layer) {
  const uint32_t tokens = inputs_.tokens;
  const int d = config_.hidden_size, f = config_.intermediate_size;
  Scratch& s = scratch_;
  absl::Status status = norm(s.x, layer.post_norm, s.normed, tokens, d);
  if (status.ok()) {
    status =
        multiply(s.normed, tokens, d, layer.gate_up, 2 * f, layer.gate_up_bias, s.gate_up, false);
  }
  if (status.ok()) {
    status = gpu_->launcher().swiglu(
        {.gate_up = s.gate_up, .out = s.hidden, .rows = tokens, .size = static_cast<uint32_t>(f)},
        pieces(uint64_t{tokens} * static_cast<uint64_t>(f), 256), gpu_->stream());
  }
  if (!status.ok()) return status;
  return multiply(s.hidden, tokens, f, layer.down, d, layer.down_bias, s.x, true);
}

absl::Status DeviceModel::rate(const uint32_t* rows, uint32_t count) {
  const int d = config_.hidden_size, vocab = config_.vocab_size;
  Scratch& s = scratch_;
  absl::Status status = gpu_->launcher().gather_rows({.table = s.x,
                                                      .rows = rows,
                                                      .out = s.picked,
                                                      .count = count,
                                                      .size = static_cast<uint32_t>(d)},
                                                     count, gpu_->stream());
  if (status.ok()) status = norm(s.picked, weights_.final_norm, s.normed, count, d);
  if (status.ok()) {
    status = multiply(s.normed, count, d, weights_.lm_head, vocab, nullptr, s.logits, false);
  }
  return status;
}

absl::Status DeviceModel::fetch_logits(uint32_t count) {
  return gpu_->copy(pinned_logits_->address(), address_of(scratch_.logits),
                    size_t{count} * static_cast<size_t>(config_.vocab_size) * sizeof(float));
}

// Draws a token for every row; tokens of rows that are not drawn are left unchanged.
absl::Status DeviceModel::draw() {
  const auto vocab = static_cast<size_t>(config_.vocab_size);
  absl::Status status = gpu_->launcher().sample({.logits = scratch_.logits,
                                                 .rows = inputs_.draws,
                                                 .tokens = scratch_.tokens,
                                                 .row_count = inputs_.row_count,
                                                 .vocabulary = static_cast<uint32_t>(vocab)},
                                                inputs_.row_count, gpu_->stream());
  if (!status.ok()) return status;
  return gpu_->copy(
      pinned_logits_->address() + static_cast<size_t>(limits_.max_chunks) * vocab * sizeof(float),
      address_of(scratch_.tokens), inputs_.row_count * sizeof(int32_t));
}

absl::Status DeviceModel::take(float* logits) {
  const auto vocab = static_cast<size_t>(config_.vocab_size);
  const float* const rated = pinned_logits_->as<const float>();
  bool all_drawn = inputs_.draws != nullptr;
  for (size_t i = 0; i < row_chunks_.size() && inputs_.draws != nullptr; ++i) {
    int32_t token = 0;
    std::memcpy(&token, rated + static_cast<size_t>(limits_.max_chunks) * vocab + i, sizeof token);
    if (may_draw_[i] && token != gpudirect::kernels::kUndecided) drawn_[row_chunks_[i]] = token;
    all_drawn &= drawn_[row_chunks_[i]].has_value();
  }
  if (all_drawn || row_chunks_.empty()) return absl::OkStatus();
  if (inputs_.draws != nullptr) {
    absl::Status status = fetch_logits(inputs_.row_count);
    if (status.ok()) status = gpu_->wait();
    if (!status.ok()) return status;
  }
  for (size_t i = 0; i < row_chunks_.size(); ++i) {
    std::copy_n(rated + i * vocab, vocab, logits + size_t{row_chunks_[i]} * vocab);
  }
  return absl::OkStatus();
}

std::optional<int32_t> DeviceModel::drawn(size_t chunk) const {
  return chunk < drawn_.size() ? drawn_[chunk] : std::nullopt;
}

absl::Status DeviceModel::predict_all(std::span<const SequenceChunk> chunks, LayerHook& hook) {
  const auto at_once = static_cast<size_t>(limits_.max_chunks);
  const auto vocab = static_cast<size_t>(config_.vocab_size);
  size_t row = 0;
  for (size_t c = 0; c < chunks.size(); row += chunks[c++].tokens.size()) {
    const size_t all = chunks[c].wants_all_logits ? chunks[c].tokens.size() : 0;
    for (size_t first = 0; first < all; first += at_once) {
      const size_t count = std::min(at_once, all - first);
      // Nothing of the step reads its inputs any more.
      rows_.clear();
      for (size_t i = 0; i < count; ++i) rows_.push_back(static_cast<uint32_t>(row + first + i));
      const uint32_t* const rows = add_input(rows_, places_.rows);
      absl::Status status = send_inputs(places_.rows, places_.rows + count * sizeof(uint32_t));
      if (status.ok()) status = rate(rows, static_cast<uint32_t>(count));
      if (status.ok()) status = fetch_logits(static_cast<uint32_t>(count));
      if (status.ok()) status = gpu_->wait();
      if (!status.ok()) return status;
      for (size_t i = 0; i < count; ++i) {
        hook.token_logits(c, first + i,
                          std::span(pinned_logits_->as<const float>() + i * vocab, vocab));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status DeviceModel::tell_written(LayerHook& hook) {
  if (!tells_) return absl::OkStatus();
  // The stream writes one layer after the other: a ticket is there for those before it, too.
  int until = told_;
  const auto polled = tickets_->poll(
      [&](uint64_t, uint32_t layer) { until = std::max(until, static_cast<int>(layer) + 1); });
  if (!polled.ok()) return polled.status();
  while (told_ < until) hook.kv_written(told_++);
  return absl::OkStatus();
}

absl::Status DeviceModel::queue_layer(int l, const KvCache& cache, LayerHook* hook) {
  const DeviceLayer& layer = weights_.layers[static_cast<size_t>(l)];
  absl::Status status = project_qkv(layer);
  if (status.ok() && hook != nullptr) status = hook->before_layer(l);
  if (status.ok()) status = store(l, cache);
  if (status.ok()) status = mark_written(l);
  if (status.ok()) status = attend(l, cache);
  if (status.ok()) {
    status = multiply(scratch_.attended, inputs_.tokens, config_.num_heads * config_.head_dim,
                      layer.output, config_.hidden_size, layer.output_bias, scratch_.x, true);
  }
  if (status.ok()) status = feed_forward(layer);
  if (status.ok() && hook != nullptr) status = tell_written(*hook);
  return status;
}

absl::Status DeviceModel::queue_step(const KvCache& cache, LayerHook* hook) {
  absl::Status status;
  if (tells_) status = tickets_->begin(gpu_->stream());
  if (status.ok()) {
    status = gpu_->launcher().gather_rows({.table = weights_.embedding,
                                           .rows = inputs_.ids,
                                           .out = scratch_.x,
                                           .count = inputs_.tokens,
                                           .size = static_cast<uint32_t>(config_.hidden_size),
                                           .element = gpudirect::kernels::Element::kBF16},
                                          inputs_.tokens, gpu_->stream());
  }
  for (int l = 0; l < config_.num_layers && status.ok(); ++l) status = queue_layer(l, cache, hook);
  if (status.ok() && inputs_.row_count > 0) {
    status = rate(inputs_.rows, inputs_.row_count);
    if (status.ok()) status = inputs_.draws != nullptr ? draw() : fetch_logits(inputs_.row_count);
  }
  return status;
}

bool DeviceModel::may_come_again(std::span<const SequenceChunk> chunks,
                                 const LayerHook& hook) const {
  if (!use_graphs_ || hook.waits() || !gpudirect::StreamGraph::possible(gpu_->device()).ok()) {
    return false;
  }
  return inputs_.task_count == 0 &&
         std::all_of(chunks.begin(), chunks.end(), [](const auto& chunk) {
           return chunk.tokens.size() == 1 && chunk.wants_logits && !chunk.wants_all_logits;
         });
}

absl::Status DeviceModel::compute(std::span<const SequenceChunk> chunks, const KvCache& cache,
                                  LayerHook& hook, float* logits) {
  absl::Status status = read_inputs(chunks);
  if (!status.ok()) return status;
  told_ = 0;
  tells_ = hook.hears_layers() && tickets_ != nullptr;
  comes_again_ = may_come_again(chunks, hook);
  if (comes_again_) {
    for (int l = 0; l < config_.num_layers && status.ok(); ++l) status = hook.before_layer(l);
    if (!status.ok()) return status;
    const auto queue = [&] { return queue_step(cache, nullptr); };
    const auto graph = graphs_.of(gpu_->device(), gpu_->stream(),
                                  {.tokens = inputs_.tokens,
                                   .draws = inputs_.draws != nullptr,
                                   .joins = inputs_.joins,
                                   .tells = tells_,
                                   .cache = cache.base()},
                                  queue);
    if (!graph.ok()) return graph.status();
    status = *graph != nullptr ? (*graph)->launch(gpu_->stream()) : queue();
  } else {
    status = queue_step(cache, &hook);
  }
  if (!status.ok()) return status;
  absl::Status told;
  status = gpu_->wait([&] {
    if (told.ok()) told = tell_written(hook);
  });
  if (status.ok()) status = told;
  if (status.ok()) status = tell_written(hook);
  if (!status.ok()) return status;
  if (tells_ && told_ < config_.num_layers) {
    return absl::InternalError("a step has ended without a report of its last layers");
  }
  while (told_ < config_.num_layers) hook.kv_written(told_++);
  if (status = take(logits); !status.ok()) return status;
  return predict_all(chunks, hook);
}

absl::Status DeviceModel::forward(std::span<const SequenceChunk> chunks, KvCache& cache,
                                  LayerHook& hook, float* logits) {
  absl::Status status =
      check_chunks(config_, config_.kv_geometry(), chunks, cache, limits_, logits);
  if (!status.ok() || chunks.empty()) return status;
  const Device::Current current(gpu_->device());
  if (!current.status().ok()) return current.status();
  status = compute(chunks, cache, hook, logits);
  // Work on the stream uses this step's memory, and writes blocks that may soon belong to others.
  const absl::Status ended = gpu_->wait();
  if (!status.ok() && tickets_ != nullptr) tickets_->forget_steps();
  return status.ok() ? ended : status;
}

}  // namespace baton::engine::device
