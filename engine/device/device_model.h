// A model on a GPU: weights, scratch memory and the KV cache in its memory, and a step of the
// engine as launches on one stream.
//
// In fp32 arithmetic (weights in bf16, all else in fp32) every sum is in the CPU's order, so logits
// and KV have the CPU's bits: a prompt may be computed on a GPU and continued on a CPU, or the
// other way round, and the tokens are those of one of them alone. In bf16 arithmetic tensor cores
// multiply, which add in an order of their own: rows are still the same in any batch, but differ
// from the CPU's in their last places, so KV is not shared with it ("bf16-cuda" in the
// fingerprint).
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/device/gpu.h"
#include "engine/model/checkpoint.h"
#include "engine/model/config.h"
#include "engine/model/model_runner.h"
#include "gpudirect/blas/gpu_gemm.h"
#include "gpudirect/launcher.h"
#include "gpudirect/layer_tickets.h"

namespace baton::engine::device {

// A checkpoint's weights in the memory of a device, as files have them: [out][in] in bf16, norms
// and biases in fp32.

// Addresses of the device; null where the model has no such weight.
struct DeviceLayer {
  const float* input_norm = nullptr;  // [d]
  const uint16_t* query = nullptr;    // [H * head_dim][d]
  const uint16_t* key = nullptr;      // [KV * head_dim][d]
  const uint16_t* value = nullptr;    // the same
  const uint16_t* output = nullptr;   // [d][H * head_dim]
  const float* post_norm = nullptr;   // [d]
  const uint16_t* gate_up = nullptr;  // [2 F][d]: the gate, then up
  const uint16_t* down = nullptr;     // [d][F]
  const float* query_bias = nullptr;
  const float* key_bias = nullptr;
  const float* value_bias = nullptr;
  const float* output_bias = nullptr;
  const float* gate_up_bias = nullptr;
  const float* down_bias = nullptr;
  const float* query_norm = nullptr;  // [head_dim]
  const float* key_norm = nullptr;
};

struct DeviceWeights {
  const uint16_t* embedding = nullptr;  // [V][d]
  std::vector<DeviceLayer> layers;
  const float* final_norm = nullptr;
  const uint16_t* lm_head = nullptr;  // [V][d]
  std::unique_ptr<gpudirect::DeviceSlab> memory;

  // Uploads all. Unimplemented: experts. ResourceExhausted: the device has not so much memory.
  static absl::StatusOr<DeviceWeights> upload(Gpu& gpu, const Checkpoint& checkpoint);
};

// Steps that come again and again, each recorded once as a CUDA graph: a step of decoding is
// hundreds of small kernels, and a launch of its graph is one call.

// The facts that decide a step's kernel launches, except for what kernels read in device memory.
struct StepShape {
  uint32_t tokens = 0;  // one of each sequence
  bool draws = false;
  bool joins = false;  // some context has several splits
  bool tells = false;  // of layers
  const void* cache = nullptr;
  // A false alarm of clang-tidy: it takes the zero that a default compares with for a pointer.
  friend auto operator<=>(const StepShape&,
                          const StepShape&) = default;  // NOLINT(modernize-use-nullptr)
};

class StepGraphs {
 public:
  // How many are kept: those that were used last.
  static constexpr size_t kMost = 48;

  // The graph of such steps: recorded when the second one comes, by what `queue` puts on the
  // stream. Null for the first one, which has no shape yet.
  absl::StatusOr<const gpudirect::StreamGraph*> of(const gpudirect::Device& device,
                                                   gpudirect::Stream stream, const StepShape& shape,
                                                   absl::FunctionRef<absl::Status()> queue);
  // When none of them runs any more.
  void clear() { graphs_.clear(); }
  uint64_t recorded() const { return recorded_; }

 private:
  struct Kept {
    std::unique_ptr<gpudirect::StreamGraph> graph;
    uint64_t used = 0;
  };
  std::map<StepShape, Kept> graphs_;
  uint64_t steps_ = 0;
  uint64_t recorded_ = 0;
};

// The part of a model's fingerprint that tells how a device computes KV.
std::string_view device_arithmetic(Arithmetic arithmetic);

// After an error of the driver the step's requests fail, and the next step works unless the device
// is lost.
class DeviceModel final : public ModelRunner {
 public:
  // Uploads the weights; the checkpoint is not needed afterwards. `blas`, if it is there, may
  // multiply in bf16 arithmetic, and outlives the model. Unimplemented: experts.
  static absl::StatusOr<std::unique_ptr<DeviceModel>> create(
      std::unique_ptr<Gpu> gpu, const Checkpoint& checkpoint, Arithmetic arithmetic,
      const absl::StatusOr<const gpudirect::CublasLt*>& blas =
          absl::UnavailableError("no cuBLASLt was given"));
  ~DeviceModel() override;

  // "CUDA device 0: NVIDIA H100 80GB HBM3"; of a prepared one also what multiplies.
  std::string name() const override;
  absl::Status prepare(const WorkspaceLimits& limits) override;
  // Memory that adapters and other processes may be given, as far as the device can do that. The
  // last one's is given back when there is another.
  absl::StatusOr<void*> allocate_cache(size_t bytes) override;
  std::optional<int> device() const override { return gpu_->device().ordinal(); }
  absl::Status forward(std::span<const SequenceChunk> chunks, KvCache& cache, LayerHook& hook,
                       float* logits) override;
  absl::Status alive() const override { return gpu_->alive(); }
  std::optional<int32_t> drawn(size_t chunk) const override;

  // Records repeated steps as CUDA graphs if the driver supports them. Call this before prepare().
  // Results stay the same, bit by bit.
  void use_graphs(bool on) { use_graphs_ = on; }
  uint64_t graphs_recorded() const { return graphs_.recorded(); }

  const Gpu& gpu() const { return *gpu_; }

 private:
  // Arrays of the device, for a step.
  struct Scratch {
    float* x = nullptr;         // [tokens][d], the residual stream
    float* normed = nullptr;    // [tokens or chunks][d]
    float* picked = nullptr;    // [chunks][d]: rows that want logits
    float* q = nullptr;         // [tokens][H * head_dim]
    float* k = nullptr;         // [tokens][KV * head_dim]
    float* v = nullptr;         // the same
    float* attended = nullptr;  // like q
    float* gate_up = nullptr;   // [tokens][2 F]
    float* hidden = nullptr;    // [tokens][F]
    float* logits = nullptr;    // [chunks][V]
    int32_t* tokens = nullptr;  // [chunks], that were drawn
    float* partial = nullptr;   // of splits
    float* cos = nullptr;       // [positions][head_dim / 2]
    float* sin = nullptr;
    std::byte* inputs = nullptr;
  };
  // Offsets in bytes of a step's lists among its inputs: equal in every step, so that a CUDA graph
  // finds them.
  struct InputPlaces {
    size_t ids = 0, positions = 0, slots = 0, rows = 0, draws = 0, counts = 0, tasks = 0,
           split_tasks = 0, items = 0, tables = 0, end = 0;
  };
  // The inputs of a step, on the device.
  struct Inputs {
    uint32_t tokens = 0;
    const uint32_t* ids = nullptr;        // [tokens]
    const uint32_t* positions = nullptr;  // [tokens]
    const uint32_t* slots = nullptr;      // [tokens]
    const uint32_t* tables = nullptr;
    const gpudirect::kernels::AttentionTask* tasks = nullptr;  // of attend_pages
    uint32_t task_count = 0;
    const gpudirect::kernels::SplitTask* split_tasks = nullptr;  // of attend_splits
    uint32_t split_task_count = 0;
    const gpudirect::kernels::SplitItem* items = nullptr;
    uint32_t item_count = 0;
    bool joins = false;  // some task has several splits
    const uint32_t* counts = nullptr;
    const uint32_t* rows = nullptr;  // that want logits
    uint32_t row_count = 0;
    const gpudirect::kernels::SampleRow* draws = nullptr;  // by row; null: none is drawn
  };

  DeviceModel(std::unique_ptr<Gpu> gpu, const Checkpoint& checkpoint, Arithmetic arithmetic,
              absl::StatusOr<const gpudirect::CublasLt*> blas);
  absl::Status prepare_products();
  void place_scratch(Carver& carver);
  void place_inputs();
  // To pinned memory; where the device will have them.
  template <typename T>
  const T* add_input(const std::vector<T>& values, size_t place);
  absl::Status send_inputs(size_t begin, size_t end);
  // Lists the tokens, pages and tasks of a chunk.
  void add_chunk(const SequenceChunk& chunk);
  absl::Status read_inputs(std::span<const SequenceChunk> chunks);
  absl::Status compute(std::span<const SequenceChunk> chunks, const KvCache& cache, LayerHook& hook,
                       float* logits);
  absl::Status project_qkv(const DeviceLayer& layer);
  absl::Status store(int l, const KvCache& cache);
  absl::Status attend(int l, const KvCache& cache);
  absl::Status feed_forward(const DeviceLayer& layer);
  // `rows` of the residual stream to logits, and these to pinned memory, when the stream has come
  // there.
  absl::Status rate(const uint32_t* rows, uint32_t count);
  absl::Status fetch_logits(uint32_t count);
  absl::Status draw();
  // Tokens and logits of the step, when the stream has come to its end.
  absl::Status take(float* logits);
  absl::Status predict_all(std::span<const SequenceChunk> chunks, LayerHook& hook);
  absl::Status norm(const float* x, const float* weight, float* y, uint32_t rows, int size);
  absl::Status multiply(const float* a, uint32_t rows, int k, const uint16_t* w, int n,
                        const float* bias, float* c, bool accumulate);
  absl::Status prepare_layers();
  // True if a step consists of single tokens that all draw or want logits, and waits for nothing:
  // such a step may be repeated as a CUDA graph.
  bool may_come_again(std::span<const SequenceChunk> chunks, const LayerHook& hook) const;
  // Puts the step on the stream. With a hook it asks and tells that of the layers meanwhile.
  absl::Status queue_step(const KvCache& cache, LayerHook* hook);
  absl::Status queue_layer(int l, const KvCache& cache, LayerHook* hook);
  absl::Status mark_written(int l);
  // Says of layers that they are written, as far as they are.
  absl::Status tell_written(LayerHook& hook);
  gpudirect::kernels::CacheLayer cache_layer(int l, const KvCache& cache) const;

  // In this order: what is on the device goes before it does.
  std::unique_ptr<Gpu> gpu_;
  const ModelConfig config_;
  const Arithmetic arithmetic_;
  const absl::StatusOr<const gpudirect::CublasLt*> blas_;
  DeviceWeights weights_;
  std::unique_ptr<gpudirect::GpuGemm> products_;  // in bf16 arithmetic
  WorkspaceLimits limits_;
  std::unique_ptr<gpudirect::DeviceSlab> cache_memory_;
  std::unique_ptr<gpudirect::DeviceSlab> scratch_memory_;
  std::unique_ptr<gpudirect::RegisteredPages> pinned_inputs_;
  std::unique_ptr<gpudirect::RegisteredPages> pinned_logits_;
  std::unique_ptr<gpudirect::LayerTickets> tickets_;  // null: the device has none
  int told_ = 0;                                      // layers of this step
  bool tells_ = false;  // this step tells of its layers before it ends
  bool comes_again_ = false;
  bool use_graphs_ = true;
  StepGraphs graphs_;
  Scratch scratch_;
  size_t most_splits_ = 0;  // that there is room for
  InputPlaces places_;
  Inputs inputs_;
  // The step's inputs, before they go to pinned memory.
  std::vector<uint32_t> ids_, positions_, slots_, tables_, rows_, row_chunks_;
  std::vector<gpudirect::kernels::AttentionTask> tasks_;
  std::vector<gpudirect::kernels::SplitTask> split_tasks_;
  std::vector<gpudirect::kernels::SplitItem> items_;
  std::vector<gpudirect::kernels::SampleRow> draws_;  // by row
  std::vector<bool> may_draw_;                        // by row
  std::vector<std::optional<int32_t>> drawn_;         // by chunk
};

}  // namespace baton::engine::device
