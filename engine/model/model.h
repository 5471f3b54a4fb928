// A Llama-style transformer on the CPU: mixed prefill/decode batches over a paged KV cache.
//
// Batch invariance: the logits and the KV of a token depend only on the tokens before it, to the
// bit: not on what else is in the batch, how its prompt was cut into chunks, or the number of
// threads or tensor-parallel ranks. Every output of a matrix product is one chain that does not
// depend on these; no sum is split across threads or ranks; attention always reads K and V back
// from the cache in bf16.
// With FMA (any x86-64 since 2013) results are also the same across vector widths, and in bf16
// arithmetic with and without a tile unit. Between arithmetics they differ.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/kernels/bf16_gemm.h"
#include "engine/kernels/compute_pool.h"
#include "engine/kernels/kv_cache.h"
#include "engine/model/config.h"
#include "engine/model/shard.h"

namespace baton::engine {

struct Checkpoint;

// How the token behind a chunk is drawn: what serve::Sampler does without penalties, and with this
// uniform_at(seed, position).
struct DrawRule {
  double temperature = 0;  // 0: the likeliest
  double top_p = 1;
  double uniform = 0;
  uint32_t top_k = 0;  // 0: all
};

// The new tokens of one sequence in a step: a prompt, a piece of one, or one decoded token.
struct SequenceChunk {
  std::span<const int32_t> tokens;  // at least one, each in [0, vocab)
  int32_t position = 0;             // of tokens[0]; KV of [0, position) is in the cache already
  // Block i holds positions [16 i, 16 i + 16); must cover position + tokens.size() positions.
  std::span<const uint32_t> block_table;
  bool wants_logits = true;       // of the last token
  bool wants_all_logits = false;  // of every token, through LayerHook::token_logits()
  // A runner that can do so draws the next token by it (ModelRunner::drawn()), and may leave the
  // logits out then.
  const DrawRule* draw = nullptr;
};

// Called by forward() on the calling thread, in layer order. Neither call may throw.
class LayerHook {
 public:
  virtual ~LayerHook() = default;
  // Before this layer's blocks are touched (new K/V stored, old K/V read): a decode worker waits
  // here until the layer has arrived. An error ends forward() with that error.
  virtual absl::Status before_layer(int layer) {
    (void)layer;
    return absl::OkStatus();
  }
  // True if before_layer() may wait for data that arrives while the step runs. If false, a runner
  // may call it for all layers before it starts.
  virtual bool waits() const { return true; }
  // True if kv_written() must be called as soon as a layer is written. If false, a runner may call
  // it for all layers at the end.
  virtual bool hears_layers() const { return true; }
  // The K/V of all new tokens of the batch are in this layer's blocks, which forward() will not
  // write again: a prefill worker starts sending them here, while the layer's attention and
  // everything after it are still to be computed.
  virtual void kv_written(int layer) { (void)layer; }
  // After the last layer, for chunks that want all logits: those behind tokens[token] of chunk
  // `chunk`, in order; valid during the call.
  virtual void token_logits(size_t chunk, size_t token, std::span<const float> logits) {
    (void)chunk, (void)token, (void)logits;
  }
};

struct WorkspaceLimits {
  int max_tokens = 512;  // new tokens in one forward(), all chunks together
  int max_chunks = 64;   // chunks in one forward()
  int max_context = 0;   // longest position + 1; 0 means the model's max_position_embeddings
  // The unit that multiplies in bf16 arithmetic. It only affects speed: every unit gives the same
  // bits.
  Bf16Unit bf16_unit = best_bf16_unit();
};

// Checks that chunks can be computed with this cache, and with logits or without, as
// Model::forward() requires.
absl::Status check_chunks(const ModelConfig& config, const KvGeometry& geometry,
                          std::span<const SequenceChunk> chunks, const KvCache& cache,
                          const WorkspaceLimits& limits, const float* logits);

// All scratch memory of forward(), allocated and touched once. One forward() at a time.
class Workspace {
 public:
  ~Workspace();
  Workspace(Workspace&&) noexcept;
  Workspace& operator=(Workspace&&) noexcept;
  const WorkspaceLimits& limits() const;
  size_t bytes() const;

 private:
  friend class Model;
  struct Impl;
  explicit Workspace(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Weights in bf16, packed for the kernels. Immutable: any number of threads may call forward() on
// one Model, each with its own Workspace.
class Model {
 public:
  // Reads config.json and model.safetensors, or the shards of model.safetensors.index.json.
  // f32, f16 and bf16 tensors are accepted; f32 and f16 are rounded to bf16. Of the weights a rank
  // of several keeps its share (engine/model/shard.h), once it has read all. Takes about as much
  // memory as the weights have bytes, and a layer more.
  static absl::StatusOr<Model> load(const std::string& directory,
                                    Arithmetic arithmetic = Arithmetic::kFp32,
                                    const ModelShard& shard = {});
  // Packs a checkpoint that is in memory (engine/model/checkpoint.h; it can save one too).
  // InvalidArgument: a shard that the model cannot be cut into.
  static absl::StatusOr<Model> create(const Checkpoint& checkpoint,
                                      Arithmetic arithmetic = Arithmetic::kFp32,
                                      const ModelShard& shard = {});
  // The same, where the checkpoint's weights are freed as they are packed.
  static absl::StatusOr<Model> create(Checkpoint&& checkpoint,
                                      Arithmetic arithmetic = Arithmetic::kFp32,
                                      const ModelShard& shard = {});
  // A model without weights, only config and fingerprint, for a model that a device computes. Its
  // forward() fails. `arithmetic` goes into the fingerprint unless it is "fp32".
  static absl::StatusOr<Model> describe(const Checkpoint& checkpoint, std::string_view arithmetic);

  Model(Model&&) noexcept;
  Model& operator=(Model&&) noexcept;
  ~Model();

  const ModelConfig& config() const;  // of the whole model
  const ModelShard& shard() const;
  KvGeometry kv_geometry() const;  // with this rank's heads
  Arithmetic arithmetic() const;
  // Covers the checkpoint (engine/model/checkpoint.h), and the arithmetic if not fp32: all that
  // the KV depends on, so that workers and stores never mix the KV of two arithmetics. The same
  // for all ranks, and for every number of them.
  const std::string& fingerprint() const;
  // Bytes of packed weights.
  size_t weight_bytes() const;

  // `pool` must outlive the workspace, and so must `exchange`, which a rank of several needs. All
  // ranks give the same limits.
  absl::StatusOr<Workspace> make_workspace(const WorkspaceLimits& limits, ComputePool& pool,
                                           ShardExchange* exchange = nullptr) const;

  // Computes the chunks, stores their K/V through the block tables and, for each chunk i that
  // wants them, writes the logits of its last token to logits + i * vocab_size (other rows are
  // not touched; `logits` is [chunks][vocab_size] fp32 and may be null if no chunk wants any).
  // No two chunks may be of one sequence. Allocates nothing on success.
  // InvalidArgument if a chunk is malformed or exceeds the workspace; nothing is written then.
  // Several ranks compute the same chunks at the same time, each with its own cache, and all
  // get the logits; an error of the exchange ends it.
  absl::Status forward(std::span<const SequenceChunk> chunks, KvCache& cache, LayerHook& hook,
                       Workspace& workspace, float* logits) const;

 private:
  struct Impl;
  explicit Model(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace baton::engine
