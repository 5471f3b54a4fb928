// The parts of a Model, for the sources that compute with it.
#pragma once

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "engine/kernels/aligned.h"
#include "engine/kernels/compute_pool.h"
#include "engine/model/model.h"
#include "engine/model/packed_layer.h"
#include "engine/model/workspace.h"

namespace baton::engine {

inline constexpr int kRowsPerTask = 16;  // of normalisation and activation

inline void add_bias(const std::vector<float>& bias, float* row) {
  for (size_t i = 0; i < bias.size(); ++i) row[i] += bias[i];
}

// fn(row) or fn(row, thread) for each.
template <typename Fn>
void for_rows(ComputePool& pool, int rows, Fn&& fn) {
  pool.parallel_for((rows + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task, int thread) {
    const int first = static_cast<int>(task) * kRowsPerTask;
    for (int row = first; row < std::min(rows, first + kRowsPerTask); ++row) {
      if constexpr (std::is_invocable_v<Fn, size_t, int>) {
        fn(size_t(row), thread);
      } else {
        fn(size_t(row));
      }
    }
  });
}

struct Model::Impl {
  ModelConfig config;
  ModelShard shard;
  Arithmetic arithmetic = Arithmetic::kFp32;
  std::string fingerprint;
  std::vector<uint16_t> embedding;  // [V][d]
  std::vector<Layer> layers;
  AlignedArray<float> final_norm;  // [d]
  PackedWeight lm_head;            // n = V, or this rank's slice of it

  // `spent`, if given, is the checkpoint, which may be taken apart on the way.
  static absl::StatusOr<std::unique_ptr<Impl>> make(const Checkpoint& checkpoint,
                                                    Arithmetic arithmetic, const ModelShard& shard,
                                                    Checkpoint* spent);

  // This rank's.
  int heads() const { return config.num_heads / shard.ranks; }
  int kv_heads() const { return config.num_kv_heads / shard.ranks; }
  size_t q_width() const { return size_t(heads()) * config.head_dim; }
  size_t kv_width() const { return size_t(kv_heads()) * config.head_dim; }
  Slice of_x() const { return slice_of(config.hidden_size, shard); }
  KvGeometry kv_geometry() const {
    KvGeometry geometry = config.kv_geometry();
    geometry.kv_heads = kv_heads();
    return geometry;
  }

  // out [rows][weight.n] (row stride ldc) = a [rows][weight.k] (row stride lda) times the weight,
  // or += it.
  static void multiply(Workspace::Impl& w, int rows, const float* a, size_t lda,
                       const WeightView& weight, float* out, size_t ldc, bool accumulate);
  // The same for the rows of each expert that has some: [slots][n] = [slots][k] times its weight.
  static void multiply_experts(Workspace::Impl& w, std::span<const ExpertTable::Group> groups,
                               const float* a, size_t lda, const PackedWeight& weight, float* out,
                               size_t ldc);
  // Puts the ranks' slices of a result of `columns` columns together: from `own` (row stride
  // `stride`) here, into `out` [rows][columns], where the own one may be already.
  absl::Status gather(Workspace::Impl& w, int rows, const float* own, size_t stride, int columns,
                      float* out) const;
  // x += input [rows][columns] times the weight, plus the bias. This rank has its slice of the
  // input's columns, with row stride `stride`.
  absl::Status add_to_x(Workspace::Impl& w, int rows, const float* own, size_t stride, int columns,
                        const WeightView& weight, const std::vector<float>& bias) const;
  void plan(std::span<const SequenceChunk> chunks, Workspace::Impl& w) const;
  void project_qkv(const Layer& layer, int tokens, Workspace::Impl& w) const;
  // K and V of the chunks' tokens into their blocks.
  void store(int layer, std::span<const SequenceChunk> chunks, const KvCache& cache,
             Workspace::Impl& w) const;
  void attend(int layer, std::span<const SequenceChunk> chunks, const KvCache& cache,
              Workspace::Impl& w) const;
  absl::Status feed_forward(const Layer& layer, int tokens, Workspace::Impl& w) const;
  absl::Status ask_experts(const Layer& layer, int tokens, Workspace::Impl& w) const;
  absl::Status ask_experts_of_ranks(const Layer& layer, int tokens, Workspace::Impl& w) const;
  // Logits [rows][vocab] of the first rows of `normed`; valid until the next call.
  absl::StatusOr<const float*> rate(int rows, Workspace::Impl& w) const;
  absl::Status predict(Workspace::Impl& w, float* logits) const;
  absl::Status predict_all(std::span<const SequenceChunk> chunks, LayerHook& hook,
                           Workspace::Impl& w) const;
};

}  // namespace baton::engine
