// Model: packed weights and the forward pass.
#include "engine/model/model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/kernels/aligned.h"
#include "engine/kernels/attention.h"
#include "engine/kernels/elementwise.h"
#include "engine/model/checkpoint.h"
#include "engine/model/model_impl.h"

namespace baton::engine {

absl::Status check_chunks(const ModelConfig& config, const KvGeometry& geometry,
                          std::span<const SequenceChunk> chunks, const KvCache& cache,
                          const WorkspaceLimits& limits, const float* logits) {
  if (cache.geometry() != geometry) {
    return absl::InvalidArgumentError("the KV cache has another geometry than the model");
  }
  if (chunks.size() > static_cast<size_t>(limits.max_chunks)) {
    return absl::InvalidArgumentError(
        absl::StrCat(chunks.size(), " chunks in a step; the workspace holds ", limits.max_chunks));
  }
  size_t total = 0;
  for (size_t i = 0; i < chunks.size(); ++i) {
    const SequenceChunk& chunk = chunks[i];
    const auto bad = [&](auto&&... parts) {
      return absl::InvalidArgumentError(absl::StrCat("chunk ", i, ": ", parts...));
    };
    total += chunk.tokens.size();
    if (chunk.tokens.empty()) return bad("has no tokens");
    if (total > static_cast<size_t>(limits.max_tokens)) {
      return bad("brings the step to ", total, " tokens; the workspace holds ", limits.max_tokens);
    }
    if (chunk.position < 0 ||
        chunk.position > limits.max_context - static_cast<int>(chunk.tokens.size())) {
      return bad("positions ", chunk.position, " + ", chunk.tokens.size(),
                 " exceed the longest context, ", limits.max_context);
    }
    const size_t blocks = cache.geometry().blocks_for(chunk.position + chunk.tokens.size());
    if (chunk.block_table.size() < blocks) {
      return bad("has ", chunk.block_table.size(), " blocks where its tokens need ", blocks);
    }
    for (size_t b = 0; b < blocks; ++b) {
      if (chunk.block_table[b] >= cache.num_blocks()) {
        return bad("names block ", chunk.block_table[b], " of a cache of ", cache.num_blocks());
      }
    }
    for (const int32_t token : chunk.tokens) {
      if (token < 0 || token >= config.vocab_size) {
        return bad("token ", token, " is outside the vocabulary of ", config.vocab_size);
      }
    }
    if (chunk.wants_logits && logits == nullptr) return bad("wants logits, but none are collected");
  }
  return absl::OkStatus();
}

// Embeds the tokens and lists positions, rows that want logits and attention tasks.
void Model::Impl::plan(std::span<const SequenceChunk> chunks, Workspace::Impl& w) const {
  w.positions.clear();
  w.rows.clear();
  w.tasks.clear();
  w.stores.clear();
  const size_t d = static_cast<size_t>(config.hidden_size);
  for (size_t c = 0; c < chunks.size(); ++c) {
    const SequenceChunk& chunk = chunks[c];
    const int row = static_cast<int>(w.positions.size());
    const int count = static_cast<int>(chunk.tokens.size());
    for (int i = 0; i < count; ++i) {
      const uint16_t* from = embedding.data() + size_t(chunk.tokens[size_t(i)]) * d;
      float* to = w.x.data() + size_t(row + i) * d;
      for (size_t j = 0; j < d; ++j) to[j] = float_from_bf16(from[j]);
      w.positions.push_back(chunk.position + i);
    }
    // Two threads never write into one block.
    for (int first = 0; first < count;) {
      const int size = kStoredTokens - (chunk.position + first) % kStoredTokens;
      w.stores.push_back({static_cast<int>(c), 0, first, std::min(size, count - first), row});
      first += size;
    }
    if (chunk.wants_logits) w.rows.emplace_back(static_cast<int>(c), row + count - 1);
    for (int first = 0; first < count; first += kAttentionTokens) {
      const int size = std::min(kAttentionTokens, count - first);
      for (int head = 0; head < kv_heads(); ++head) {
        w.tasks.push_back({static_cast<int>(c), head, first, size, row});
      }
    }
  }
  // The longest first: threads then end together.
  const auto work = [&](const AttentionTask& task) {
    const int seen = chunks[static_cast<size_t>(task.chunk)].position + task.first + task.count;
    return int64_t{task.count} * seen;
  };
  std::sort(w.tasks.begin(), w.tasks.end(), [&](const AttentionTask& a, const AttentionTask& b) {
    return std::tuple(-work(a), a.chunk, a.first, a.kv_head) <
           std::tuple(-work(b), b.chunk, b.first, b.kv_head);
  });
}

void Model::Impl::project_qkv(const Layer& layer, int tokens, Workspace::Impl& w) const {
  const size_t d = static_cast<size_t>(config.hidden_size);
  const int dims = config.head_dim, queries = heads(), all = heads() + kv_heads();
  const size_t width = static_cast<size_t>(layer.qkv.n);
  for_rows(*w.pool, tokens, [&](size_t row) {
    rms_norm(w.x.data() + row * d, layer.input_norm.data(), w.normed.data() + row * d,
             config.hidden_size, static_cast<float>(config.rms_norm_eps));
  });
  multiply(w, tokens, w.normed.data(), d, layer.qkv.view(), w.qkv.data(), width, false);
  const float q_scale = 1.0f / std::sqrt(static_cast<float>(dims));
  const float eps = static_cast<float>(config.rms_norm_eps);
  for_rows(*w.pool, tokens, [&](size_t row) {
    float* q = w.qkv.data() + row * width;
    add_bias(layer.qkv_bias, q);
    if (!layer.query_norm.empty()) {
      for (int h = 0; h < all; ++h) {
        const auto& weight = h < queries ? layer.query_norm : layer.key_norm;
        rms_norm(q + h * dims, weight.data(), q + h * dims, dims, eps);
      }
    }
    const float* cos = w.rope.cos(w.positions[row]);
    const float* sin = w.rope.sin(w.positions[row]);
    for (int h = 0; h < all; ++h) rope(q + h * dims, cos, sin, dims);
    scale(q, q_scale, queries * dims);
  });
}

void Model::Impl::attend(int layer, std::span<const SequenceChunk> chunks, const KvCache& cache,
                         Workspace::Impl& w) const {
  const int dims = config.head_dim, group = config.num_heads / config.num_kv_heads;
  const size_t qkv_width = q_width() + 2 * kv_width();
  w.pool->parallel_for(static_cast<int64_t>(w.tasks.size()), [&](int64_t index, int thread) {
    const AttentionTask& task = w.tasks[static_cast<size_t>(index)];
    const SequenceChunk& chunk = chunks[static_cast<size_t>(task.chunk)];
    const size_t row = static_cast<size_t>(task.row + task.first);
    const size_t head = size_t(task.kv_head) * group * dims;
    paged_attention({.cache = &cache,
                     .layer = layer,
                     .kv_head = task.kv_head,
                     .block_table = chunk.block_table,
                     .position = chunk.position + task.first,
                     .tokens = task.count,
                     .window = config.window(layer),
                     .group = group,
                     .q = w.qkv.data() + row * qkv_width + head,
                     .q_stride = qkv_width,
                     .out = w.attended.data() + row * q_width() + head,
                     .out_stride = q_width()},
                    w.attention.data() + size_t(thread) * kAttentionScratch);
  });
}

void Model::Impl::store(int layer, std::span<const SequenceChunk> chunks, const KvCache& cache,
                        Workspace::Impl& w) const {
  const size_t stride = q_width() + 2 * kv_width();
  const auto some = [&](int64_t index, int) {
    const AttentionTask& task = w.stores[static_cast<size_t>(index)];
    const SequenceChunk& chunk = chunks[static_cast<size_t>(task.chunk)];
    const float* k = w.qkv.data() + size_t(task.row + task.first) * stride + q_width();
    store_kv(cache, layer, chunk.block_table, chunk.position + task.first, task.count, k,
             k + kv_width(), stride);
  };
  const auto count = static_cast<int64_t>(w.stores.size());
  // A few tokens are not worth waking a second thread for.
  if (w.positions.size() < size_t{kStoredTokens}) {
    for (int64_t i = 0; i < count; ++i) some(i, 0);
  } else {
    w.pool->parallel_for(count, some);
  }
}

absl::StatusOr<const float*> Model::Impl::rate(int rows, Workspace::Impl& w) const {
  const size_t width = static_cast<size_t>(lm_head.n);
  multiply(w, rows, w.normed.data(), static_cast<size_t>(config.hidden_size), lm_head.view(),
           w.logits.data(), width, false);
  if (shard.whole()) return w.logits.data();
  absl::Status status =
      gather(w, rows, w.logits.data(), width, config.vocab_size, w.gathered.data());
  if (!status.ok()) return status;
  return w.gathered.data();
}

absl::Status Model::Impl::predict(Workspace::Impl& w, float* logits) const {
  if (w.rows.empty()) return absl::OkStatus();
  const size_t d = static_cast<size_t>(config.hidden_size);
  const size_t vocab = static_cast<size_t>(config.vocab_size);
  for (size_t i = 0; i < w.rows.size(); ++i) {
    rms_norm(w.x.data() + size_t(w.rows[i].second) * d, final_norm.data(), w.normed.data() + i * d,
             config.hidden_size, static_cast<float>(config.rms_norm_eps));
  }
  const absl::StatusOr<const float*> rated = rate(static_cast<int>(w.rows.size()), w);
  if (!rated.ok()) return rated.status();
  for (size_t i = 0; i < w.rows.size(); ++i) {
    std::copy_n(*rated + i * vocab, vocab, logits + size_t(w.rows[i].first) * vocab);
  }
  return absl::OkStatus();
}

// As many rows at once as the workspace has room for.
absl::Status Model::Impl::predict_all(std::span<const SequenceChunk> chunks, LayerHook& hook,
                                      Workspace::Impl& w) const {
  const size_t d = static_cast<size_t>(config.hidden_size);
  const size_t vocab = static_cast<size_t>(config.vocab_size);
  const size_t at_once = static_cast<size_t>(w.limits.max_chunks);
  size_t row = 0;
  for (size_t c = 0; c < chunks.size(); row += chunks[c++].tokens.size()) {
    const size_t all = chunks[c].wants_all_logits ? chunks[c].tokens.size() : 0;
    for (size_t first = 0; first < all; first += at_once) {
      const size_t count = std::min(at_once, all - first);
      for (size_t i = 0; i < count; ++i) {
        rms_norm(w.x.data() + (row + first + i) * d, final_norm.data(), w.normed.data() + i * d,
                 config.hidden_size, static_cast<float>(config.rms_norm_eps));
      }
      const absl::StatusOr<const float*> rated = rate(static_cast<int>(count), w);
      if (!rated.ok()) return rated.status();
      for (size_t i = 0; i < count; ++i) {
        hook.token_logits(c, first + i, std::span(*rated + i * vocab, vocab));
      }
    }
  }
  return absl::OkStatus();
}

Model::Model(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Model::Model(Model&&) noexcept = default;
Model& Model::operator=(Model&&) noexcept = default;
Model::~Model() = default;
const std::string& Model::fingerprint() const { return impl_->fingerprint; }
Arithmetic Model::arithmetic() const { return impl_->arithmetic; }
const ModelConfig& Model::config() const { return impl_->config; }
const ModelShard& Model::shard() const { return impl_->shard; }
KvGeometry Model::kv_geometry() const { return impl_->kv_geometry(); }

size_t Model::weight_bytes() const {
  size_t bytes = impl_->lm_head.bytes() + impl_->embedding.size() * sizeof(uint16_t);
  for (const Layer& layer : impl_->layers) {
    for (const PackedWeight* weight :
         {&layer.qkv, &layer.output, &layer.router, &layer.gate_up, &layer.down}) {
      bytes += weight->bytes();
    }
  }
  return bytes;
}

absl::StatusOr<std::unique_ptr<Model::Impl>> Model::Impl::make(const Checkpoint& checkpoint,
                                                               Arithmetic arithmetic,
                                                               const ModelShard& shard,
                                                               Checkpoint* spent) {
  if (absl::Status status = checkpoint.config.validate(); !status.ok()) return status;
  if (absl::Status status = check_shard(checkpoint.config, shard); !status.ok()) return status;
  const std::vector<Weight> expected = weight_list(checkpoint.config);
  bool complete = expected.size() == checkpoint.weights.size();
  for (size_t i = 0; complete && i < expected.size(); ++i) {
    const Weight& weight = checkpoint.weights[i];
    complete = weight.rows == expected[i].rows && weight.cols == expected[i].cols &&
               weight.data.size() == size_t(weight.rows) * weight.cols;
  }
  if (!complete) {
    return absl::InvalidArgumentError("the checkpoint's weights do not match its config");
  }
  auto impl = std::make_unique<Impl>();
  impl->config = checkpoint.config;
  impl->shard = shard;
  impl->arithmetic = arithmetic;
  impl->fingerprint = engine::fingerprint(checkpoint);
  if (arithmetic != Arithmetic::kFp32) {
    absl::StrAppend(&impl->fingerprint, "+", arithmetic_name(arithmetic));
  }
  impl->embedding = checkpoint.embedding().data;
  for (int l = 0; l < checkpoint.config.num_layers; ++l) {
    impl->layers.push_back(make_layer(checkpoint, l, arithmetic, shard));
    if (spent != nullptr) spent->forget_layer(l);
  }
  impl->final_norm = widen(checkpoint.final_norm());
  impl->lm_head = pack(arithmetic, shard, {&checkpoint.lm_head()});
  return impl;
}

absl::StatusOr<Model> Model::load(const std::string& directory, Arithmetic arithmetic,
                                  const ModelShard& shard) {
  auto checkpoint = load_checkpoint(directory);
  if (!checkpoint.ok()) return checkpoint.status();
  return create(*std::move(checkpoint), arithmetic, shard);
}

absl::StatusOr<Model> Model::create(Checkpoint&& checkpoint, Arithmetic arithmetic,
                                    const ModelShard& shard) {
  // Once, not twice, in memory: what is packed is freed.
  auto impl = Impl::make(checkpoint, arithmetic, shard, &checkpoint);
  if (!impl.ok()) return impl.status();
  return Model(*std::move(impl));
}

absl::StatusOr<Model> Model::create(const Checkpoint& checkpoint, Arithmetic arithmetic,
                                    const ModelShard& shard) {
  auto impl = Impl::make(checkpoint, arithmetic, shard, nullptr);
  if (!impl.ok()) return impl.status();
  return Model(*std::move(impl));
}

absl::StatusOr<Model> Model::describe(const Checkpoint& checkpoint, std::string_view arithmetic) {
  if (absl::Status status = checkpoint.config.validate(); !status.ok()) return status;
  auto impl = std::make_unique<Impl>();
  impl->config = checkpoint.config;
  impl->fingerprint = engine::fingerprint(checkpoint);
  if (arithmetic != "fp32") (impl->fingerprint += "+") += arithmetic;
  return Model(std::move(impl));
}

absl::StatusOr<Workspace> Model::make_workspace(const WorkspaceLimits& limits, ComputePool& pool,
                                                ShardExchange* exchange) const {
  if (impl_->layers.empty()) {
    return absl::FailedPreconditionError(
        "the model has no weights in host memory: a device computes it");
  }
  WorkspaceLimits actual = limits;
  const int longest = config().max_position_embeddings;
  if (actual.max_context == 0) actual.max_context = longest;
  if (actual.max_tokens < 1 || actual.max_chunks < 1 || actual.max_context < 1 ||
      actual.max_context > longest) {
    return absl::InvalidArgumentError(
        absl::StrCat("a workspace of ", actual.max_tokens, " tokens, ", actual.max_chunks,
                     " chunks and a context of ", actual.max_context,
                     " is not possible; the model's contexts reach ", longest));
  }
  auto impl = std::make_unique<Workspace::Impl>(config(), arithmetic(), shard(), actual, pool);
  if (absl::Status status = impl->use(exchange, config(), shard()); !status.ok()) return status;
  return Workspace(std::move(impl));
}

absl::Status Model::forward(std::span<const SequenceChunk> chunks, KvCache& cache, LayerHook& hook,
                            Workspace& workspace, float* logits) const {
  Workspace::Impl& w = *workspace.impl_;
  const Impl& m = *impl_;
  absl::Status checked = check_chunks(m.config, m.kv_geometry(), chunks, cache, w.limits, logits);
  if (!checked.ok() || chunks.empty()) return checked;
  m.plan(chunks, w);
  const int tokens = static_cast<int>(w.positions.size());
  const size_t q_width = m.q_width();
  const int q_columns = m.config.num_heads * m.config.head_dim;
  for (int l = 0; l < m.config.num_layers; ++l) {
    const Layer& layer = m.layers[static_cast<size_t>(l)];
    m.project_qkv(layer, tokens, w);
    if (absl::Status status = hook.before_layer(l); !status.ok()) return status;
    m.store(l, chunks, cache, w);
    hook.kv_written(l);
    m.attend(l, chunks, cache, w);
    absl::Status status = m.add_to_x(w, tokens, w.attended.data(), q_width, q_columns,
                                     layer.output.view(), layer.output_bias);
    if (status.ok()) status = m.feed_forward(layer, tokens, w);
    if (!status.ok()) return status;
  }
  if (absl::Status status = m.predict(w, logits); !status.ok()) return status;
  return m.predict_all(chunks, hook, w);
}

}  // namespace baton::engine
