// Model: packed weights and the forward pass.
#include "engine/model/model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/kernels/aligned.h"
#include "engine/kernels/attention.h"
#include "engine/kernels/elementwise.h"
#include "engine/kernels/gemm.h"
#include "engine/model/checkpoint.h"
#include "engine/model/packed_layer.h"
#include "engine/model/rope.h"

namespace baton::engine {
namespace {

constexpr int kRowsPerTask = 16;      // of normalisation and activation
constexpr int kAttentionTokens = 32;  // new tokens of one attention task

void add_bias(const std::vector<float>& bias, float* row) {
  for (size_t i = 0; i < bias.size(); ++i) row[i] += bias[i];
}

// A slice of one chunk's new tokens for one KV head.
struct AttentionTask {
  int chunk;
  int kv_head;
  int first;
  int count;
  int row;  // of the chunk's first token in the batch
};

template <typename Fn>
void for_rows(ComputePool& pool, int rows, Fn&& fn) {
  pool.parallel_for((rows + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task, int) {
    const int first = static_cast<int>(task) * kRowsPerTask;
    for (int row = first; row < std::min(rows, first + kRowsPerTask); ++row) fn(size_t(row));
  });
}

}  // namespace

struct Workspace::Impl {
  Impl(const ModelConfig& config, Arithmetic arithmetic, const WorkspaceLimits& given,
       ComputePool& threads)
      : limits(given),
        pool(&threads),
        rope(config, limits.max_context),
        gemm_scratch(threads.size()) {
    const size_t tokens = static_cast<size_t>(limits.max_tokens);
    const size_t d = static_cast<size_t>(config.hidden_size);
    const size_t q = size_t(config.num_heads) * config.head_dim;
    const size_t kv = size_t(config.num_kv_heads) * config.head_dim;
    const size_t f = static_cast<size_t>(config.intermediate_size);
    const size_t chunks = static_cast<size_t>(limits.max_chunks);
    x = AlignedArray<float>(tokens * d);
    normed = AlignedArray<float>(std::max(tokens, chunks) * d);
    qkv = AlignedArray<float>(tokens * (q + 2 * kv));
    attended = AlignedArray<float>(tokens * q);
    gate_up = AlignedArray<float>(tokens * 2 * f);
    logits = AlignedArray<float>(chunks * config.vocab_size);
    attention_scratch_floats = attention_scratch_size(limits.max_context);
    attention = AlignedArray<float>(attention_scratch_floats * threads.size());
    if (arithmetic == Arithmetic::kBf16) {
      bf16_scratch = Bf16Scratch(limits.bf16_unit, static_cast<int>(std::max(tokens, chunks)),
                                 static_cast<int>(std::max({d, q, f})));
    }
    positions.reserve(tokens);
    rows.reserve(chunks);
    tasks.reserve((chunks + tokens / kAttentionTokens) * config.num_kv_heads);
  }

  size_t bytes() const {
    const size_t floats = x.size() + normed.size() + qkv.size() + attended.size() + gate_up.size() +
                          logits.size() + attention.size() + rope.cosines.size() +
                          rope.sines.size();
    return floats * sizeof(float) + gemm_scratch.bytes() + bf16_scratch.bytes();
  }

  WorkspaceLimits limits;
  ComputePool* pool;
  RopeTable rope;
  GemmScratch gemm_scratch;
  Bf16Scratch bf16_scratch;      // empty in fp32 arithmetic
  AlignedArray<float> x;         // [tokens][d], the residual stream
  AlignedArray<float> normed;    // [tokens][d]
  AlignedArray<float> qkv;       // [tokens][(H + 2 KV) * head_dim]
  AlignedArray<float> attended;  // [tokens][H * head_dim]
  AlignedArray<float> gate_up;   // [tokens][2 F]; the activation replaces gate
  AlignedArray<float> logits;    // [chunks][vocab]
  AlignedArray<float> attention;
  size_t attention_scratch_floats = 0;
  std::vector<int> positions;             // of each token of the batch
  std::vector<std::pair<int, int>> rows;  // (chunk, batch row of its last token) wanting logits
  std::vector<AttentionTask> tasks;
};

Workspace::Workspace(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Workspace::Workspace(Workspace&&) noexcept = default;
Workspace& Workspace::operator=(Workspace&&) noexcept = default;
Workspace::~Workspace() = default;
const WorkspaceLimits& Workspace::limits() const { return impl_->limits; }
size_t Workspace::bytes() const { return impl_->bytes(); }

struct Model::Impl {
  ModelConfig config;
  Arithmetic arithmetic = Arithmetic::kFp32;
  std::string fingerprint;
  std::vector<uint16_t> embedding;  // [V][d]
  std::vector<Layer> layers;
  AlignedArray<float> final_norm;  // [d]
  PackedWeight lm_head;            // n = V

  // out [rows][weight.n] = a [rows][weight.k] (row stride lda) times the weight, or += it.
  static void multiply(Workspace::Impl& w, int rows, const float* a, size_t lda,
                       const PackedWeight& weight, float* out, bool accumulate);
  absl::Status check(std::span<const SequenceChunk> chunks, const KvCache& cache,
                     const WorkspaceLimits& limits, const float* logits) const;
  void plan(std::span<const SequenceChunk> chunks, Workspace::Impl& w) const;
  void project_qkv(const Layer& layer, int tokens, Workspace::Impl& w) const;
  void attend(int layer, std::span<const SequenceChunk> chunks, const KvCache& cache,
              Workspace::Impl& w) const;
  void feed_forward(const Layer& layer, int tokens, Workspace::Impl& w) const;
  void add_bias_to_x(const std::vector<float>& bias, int tokens, Workspace::Impl& w) const;
  void predict(Workspace::Impl& w, float* logits) const;
  void predict_all(std::span<const SequenceChunk> chunks, LayerHook& hook,
                   Workspace::Impl& w) const;
};

void Model::Impl::multiply(Workspace::Impl& w, int rows, const float* a, size_t lda,
                           const PackedWeight& weight, float* out, bool accumulate) {
  const size_t width = static_cast<size_t>(weight.n);
  if (weight.arithmetic == Arithmetic::kBf16) {
    gemm_bf16(*w.pool, w.bf16_scratch, rows, a, lda, weight.tiles(), out, width, accumulate);
  } else {
    gemm(*w.pool, w.gemm_scratch, rows, {a, lda, 1}, weight.b(), out, width, accumulate);
  }
}

absl::Status Model::Impl::check(std::span<const SequenceChunk> chunks, const KvCache& cache,
                                const WorkspaceLimits& limits, const float* logits) const {
  if (cache.geometry() != config.kv_geometry()) {
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
    if (chunk.wants_logits && logits == nullptr) return bad("wants logits but none are taken");
  }
  return absl::OkStatus();
}

// Embeds the tokens and lists positions, rows that want logits and attention tasks.
void Model::Impl::plan(std::span<const SequenceChunk> chunks, Workspace::Impl& w) const {
  w.positions.clear();
  w.rows.clear();
  w.tasks.clear();
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
    if (chunk.wants_logits) w.rows.emplace_back(static_cast<int>(c), row + count - 1);
    for (int first = 0; first < count; first += kAttentionTokens) {
      const int size = std::min(kAttentionTokens, count - first);
      for (int head = 0; head < config.num_kv_heads; ++head) {
        w.tasks.push_back({static_cast<int>(c), head, first, size, row});
      }
    }
  }
}

void Model::Impl::project_qkv(const Layer& layer, int tokens, Workspace::Impl& w) const {
  const size_t d = static_cast<size_t>(config.hidden_size);
  const int dims = config.head_dim, heads = config.num_heads;
  const size_t width = static_cast<size_t>(layer.qkv.n);
  for_rows(*w.pool, tokens, [&](size_t row) {
    rms_norm(w.x.data() + row * d, layer.input_norm.data(), w.normed.data() + row * d,
             config.hidden_size, static_cast<float>(config.rms_norm_eps));
  });
  multiply(w, tokens, w.normed.data(), d, layer.qkv, w.qkv.data(), false);
  const float q_scale = 1.0f / std::sqrt(static_cast<float>(dims));
  const float eps = static_cast<float>(config.rms_norm_eps);
  for_rows(*w.pool, tokens, [&](size_t row) {
    float* q = w.qkv.data() + row * width;
    add_bias(layer.qkv_bias, q);
    if (!layer.query_norm.empty()) {
      for (int h = 0; h < heads + config.num_kv_heads; ++h) {
        const auto& weight = h < heads ? layer.query_norm : layer.key_norm;
        rms_norm(q + h * dims, weight.data(), q + h * dims, dims, eps);
      }
    }
    const float* cos = w.rope.cos(w.positions[row]);
    const float* sin = w.rope.sin(w.positions[row]);
    for (int h = 0; h < heads + config.num_kv_heads; ++h) rope(q + h * dims, cos, sin, dims);
    scale(q, q_scale, heads * dims);
  });
}

void Model::Impl::attend(int layer, std::span<const SequenceChunk> chunks, const KvCache& cache,
                         Workspace::Impl& w) const {
  const int dims = config.head_dim, group = config.num_heads / config.num_kv_heads;
  const size_t q_width = size_t(config.num_heads) * dims;
  const size_t qkv_width = q_width + 2 * size_t(config.num_kv_heads) * dims;
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
                     .out = w.attended.data() + row * q_width + head,
                     .out_stride = q_width},
                    w.attention.data() + size_t(thread) * w.attention_scratch_floats);
  });
}

void Model::Impl::feed_forward(const Layer& layer, int tokens, Workspace::Impl& w) const {
  const size_t d = static_cast<size_t>(config.hidden_size);
  const size_t f = static_cast<size_t>(config.intermediate_size);
  for_rows(*w.pool, tokens, [&](size_t row) {
    rms_norm(w.x.data() + row * d, layer.post_norm.data(), w.normed.data() + row * d,
             config.hidden_size, static_cast<float>(config.rms_norm_eps));
  });
  multiply(w, tokens, w.normed.data(), d, layer.gate_up, w.gate_up.data(), false);
  for_rows(*w.pool, tokens, [&](size_t row) {
    float* gate = w.gate_up.data() + row * 2 * f;
    add_bias(layer.gate_up_bias, gate);
    swiglu(gate, gate + f, gate, config.intermediate_size);
  });
  multiply(w, tokens, w.gate_up.data(), 2 * f, layer.down, w.x.data(), true);
  add_bias_to_x(layer.down_bias, tokens, w);
}

void Model::Impl::add_bias_to_x(const std::vector<float>& bias, int tokens,
                                Workspace::Impl& w) const {
  const size_t d = static_cast<size_t>(config.hidden_size);
  if (bias.empty()) return;
  for_rows(*w.pool, tokens, [&](size_t row) { add_bias(bias, w.x.data() + row * d); });
}

void Model::Impl::predict(Workspace::Impl& w, float* logits) const {
  const size_t d = static_cast<size_t>(config.hidden_size);
  const size_t vocab = static_cast<size_t>(config.vocab_size);
  for (size_t i = 0; i < w.rows.size(); ++i) {
    rms_norm(w.x.data() + size_t(w.rows[i].second) * d, final_norm.data(), w.normed.data() + i * d,
             config.hidden_size, static_cast<float>(config.rms_norm_eps));
  }
  multiply(w, static_cast<int>(w.rows.size()), w.normed.data(), d, lm_head, w.logits.data(), false);
  for (size_t i = 0; i < w.rows.size(); ++i) {
    std::copy_n(w.logits.data() + i * vocab, vocab, logits + size_t(w.rows[i].first) * vocab);
  }
}

// As many rows at once as the workspace has room for.
void Model::Impl::predict_all(std::span<const SequenceChunk> chunks, LayerHook& hook,
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
      multiply(w, static_cast<int>(count), w.normed.data(), d, lm_head, w.logits.data(), false);
      for (size_t i = 0; i < count; ++i) {
        hook.token_logits(c, first + i, std::span(w.logits.data() + i * vocab, vocab));
      }
    }
  }
}

Model::Model(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Model::Model(Model&&) noexcept = default;
Model& Model::operator=(Model&&) noexcept = default;
Model::~Model() = default;
const std::string& Model::fingerprint() const { return impl_->fingerprint; }
Arithmetic Model::arithmetic() const { return impl_->arithmetic; }
const ModelConfig& Model::config() const { return impl_->config; }
KvGeometry Model::kv_geometry() const { return impl_->config.kv_geometry(); }

size_t Model::weight_bytes() const {
  size_t bytes = impl_->lm_head.data.size() + impl_->embedding.size();
  for (const Layer& layer : impl_->layers) {
    bytes += layer.qkv.data.size() + layer.output.data.size() + layer.gate_up.data.size() +
             layer.down.data.size();
  }
  return bytes * sizeof(uint16_t);
}

absl::StatusOr<Model> Model::load(const std::string& directory, Arithmetic arithmetic) {
  auto checkpoint = load_checkpoint(directory);
  if (!checkpoint.ok()) return checkpoint.status();
  return create(*checkpoint, arithmetic);
}

absl::StatusOr<Model> Model::create(const Checkpoint& checkpoint, Arithmetic arithmetic) {
  if (absl::Status status = checkpoint.config.validate(); !status.ok()) return status;
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
  impl->arithmetic = arithmetic;
  impl->fingerprint = engine::fingerprint(checkpoint);
  if (arithmetic != Arithmetic::kFp32) {
    absl::StrAppend(&impl->fingerprint, "+", arithmetic_name(arithmetic));
  }
  impl->embedding = checkpoint.embedding().data;
  for (int l = 0; l < checkpoint.config.num_layers; ++l)
    impl->layers.push_back(make_layer(checkpoint, l, arithmetic));
  impl->final_norm = widen(checkpoint.final_norm());
  impl->lm_head = pack(arithmetic, {&checkpoint.lm_head()});
  return Model(std::move(impl));
}

absl::StatusOr<Workspace> Model::make_workspace(const WorkspaceLimits& limits,
                                                ComputePool& pool) const {
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
  return Workspace(std::make_unique<Workspace::Impl>(config(), arithmetic(), actual, pool));
}

absl::Status Model::forward(std::span<const SequenceChunk> chunks, KvCache& cache, LayerHook& hook,
                            Workspace& workspace, float* logits) const {
  Workspace::Impl& w = *workspace.impl_;
  const Impl& m = *impl_;
  if (absl::Status status = m.check(chunks, cache, w.limits, logits); !status.ok()) return status;
  if (chunks.empty()) return absl::OkStatus();
  m.plan(chunks, w);
  const int tokens = static_cast<int>(w.positions.size());
  const size_t q_width = size_t(m.config.num_heads) * m.config.head_dim;
  const size_t kv_width = size_t(m.config.num_kv_heads) * m.config.head_dim;
  for (int l = 0; l < m.config.num_layers; ++l) {
    const Layer& layer = m.layers[static_cast<size_t>(l)];
    m.project_qkv(layer, tokens, w);
    if (absl::Status status = hook.before_layer(l); !status.ok()) return status;
    size_t row = 0;
    for (const SequenceChunk& chunk : chunks) {
      const float* k = w.qkv.data() + row * (q_width + 2 * kv_width) + q_width;
      store_kv(cache, l, chunk.block_table, chunk.position, static_cast<int>(chunk.tokens.size()),
               k, k + kv_width, q_width + 2 * kv_width);
      row += chunk.tokens.size();
    }
    hook.kv_written(l);
    m.attend(l, chunks, cache, w);
    m.multiply(w, tokens, w.attended.data(), q_width, layer.output, w.x.data(), true);
    m.add_bias_to_x(layer.output_bias, tokens, w);
    m.feed_forward(layer, tokens, w);
  }
  if (!w.rows.empty()) m.predict(w, logits);
  m.predict_all(chunks, hook, w);
  return absl::OkStatus();
}

}  // namespace baton::engine
