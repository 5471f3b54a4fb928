// Forward and backward of a training step on a GPU: Backprop's, as launches on one stream.
//
// Every sum is in the CPU's order, so that loss and gradients have the CPU's bits. All of a pass is
// put on the stream at once, with an event behind every range of gradients; the host follows from
// event to event, and tells of each range while later ones are computed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/device/gpu.h"
#include "engine/train/step/train_runner.h"

namespace baton::engine::train {

// Not thread-safe. The GPU and the map outlive it.
class DevicePass {
 public:
  // Scratch for up to max_tokens tokens of sequences up to max_length long. ResourceExhausted where
  // the device has not so much memory.
  static absl::StatusOr<std::unique_ptr<DevicePass>> create(device::Gpu& gpu,
                                                            const ParameterMap& map, int max_tokens,
                                                            int max_length);
  ~DevicePass();
  DevicePass(const DevicePass&) = delete;
  DevicePass& operator=(const DevicePass&) = delete;

  // As TrainRunner::loss_and_gradients(); without sums.gradients the mean loss alone.
  absl::StatusOr<float> run(const float* parameters, std::span<const int32_t> tokens, int sequences,
                            int length, const GradientSums& sums, const GradientsReady& ready,
                            const ParametersNeeded& needed);

 private:
  // Arrays of the device.
  struct Layer {
    float* input = nullptr;     // [tokens][d], the residual stream coming in
    float* factor1 = nullptr;   // [tokens], of the input norm
    float* normed1 = nullptr;   // [tokens][d]
    float* qkv = nullptr;       // [tokens][(H + 2 KV) * head_dim], rotated
    float* weights = nullptr;   // [sequences][H][length][length], of attention
    float* attended = nullptr;  // [tokens][H * head_dim]
    float* middle = nullptr;    // [tokens][d], the stream after attention
    float* factor2 = nullptr;   // [tokens]
    float* normed2 = nullptr;   // [tokens][d]
    float* gate_up = nullptr;   // [tokens][2 F]
    float* active = nullptr;    // [tokens][F]
  };
  struct Scratch {
    std::vector<Layer> layers;
    float *last = nullptr, *last_factor = nullptr, *last_normed = nullptr;  // behind the last layer
    float* logits = nullptr;                                                // [tokens][V]
    float *d_stream = nullptr, *d_normed = nullptr, *d_wide = nullptr, *d_active = nullptr;
    float *d_qkv = nullptr, *d_attended = nullptr, *d_weights = nullptr;
    float *cos = nullptr, *sin = nullptr;  // [positions][head_dim / 2]
    uint32_t* inputs = nullptr;            // as Inputs
  };
  // The inputs of a pass, laid out in a row in pinned memory and on the device.
  struct Inputs {
    uint32_t* tokens = nullptr;   // [tokens]
    uint32_t* targets = nullptr;  // [tokens]
    uint32_t* begins = nullptr;   // [V + 1]: where each token's places begin in `order`
    uint32_t* order = nullptr;    // [tokens]
  };
  // Gradients before `end` are final when the stream has come to event number `event`.
  struct Final {
    size_t end = 0;
    size_t event = 0;
  };
  // The arguments of a pass.
  struct Call {
    const float* parameters = nullptr;
    GradientSums sums;
    uint32_t sequences = 0;
    uint32_t length = 0;
    uint32_t rows = 0;
  };

  // Element (i, j) is at[i * row_step + j * column_step]. Attention has a matrix for each sequence
  // and KV head, `outer` and `inner` elements from one to the next.
  struct Layout {
    uint32_t rows = 0;
    uint32_t columns = 0;
    uint32_t row_step = columns;
    uint32_t column_step = 1;
    uint64_t outer = 0;
    uint64_t inner = 0;
  };
  struct Factor {
    const float* at = nullptr;
    Layout layout;
  };
  struct Target {
    float* at = nullptr;
    Layout layout;
    operator Factor() const { return {at, layout}; }
  };
  static Factor transposed(const Factor& factor);

  DevicePass(device::Gpu& gpu, const ParameterMap& map, int max_tokens, int max_length);
  absl::Status start();
  void place(device::Carver& carver);
  Inputs inputs_at(uint32_t* base) const;
  size_t input_count() const;
  absl::Status read_inputs(std::span<const int32_t> tokens);
  absl::Status forward(const ParametersNeeded& needed);
  absl::Status forward_layer(int l);
  absl::Status classify();
  absl::Status backward();
  absl::Status backward_layer(int l);
  absl::Status attend(const Layer& layer);
  absl::Status attend_back(const Layer& layer);
  // Gradients before `end` are written: they are added up, and an event follows.
  absl::Status finish_range(size_t end);
  absl::Status follow(const GradientsReady& ready);
  float mean_loss() const;

  // The products and norms of Backprop.
  absl::Status project(const float* x, const ParameterRange& range, const float* start, float* y);
  absl::Status project_back(const float* dy, const ParameterRange& range, float* dx);
  absl::Status weight_gradient(const float* dy, const float* x, const ParameterRange& range);
  absl::Status norm(const float* x, const ParameterRange& range, float* y, float* factors);
  absl::Status norm_back(const float* x, const ParameterRange& range, const float* factors,
                         bool fresh);
  absl::Status rotate(float* qkv, float direction);
  // c = start + a b, and without `start` c = a b. A causal product is one of each sequence and
  // head.
  absl::Status multiply(const Factor& a, const Factor& b, const Target& c,
                        const float* start = nullptr,
                        gpudirect::kernels::Causal causal = gpudirect::kernels::Causal::kNone);
  // The matrices of attention [length][...]: number g of the query heads of each KV head, and the
  // KV heads' own.
  Target in_qkv(float* qkv, uint32_t first, uint32_t heads) const;
  Target query(float* qkv, uint32_t g) const { return in_qkv(qkv, g * dim_, group_); }
  Target key(float* qkv) const { return in_qkv(qkv, q_width_, 1); }
  Target value(float* qkv) const { return in_qkv(qkv, q_width_ + kv_width_, 1); }
  Target in_attended(float* attended, uint32_t g) const;
  Target in_weights(float* weights, uint32_t g) const;
  absl::Status add(size_t begin, size_t end, const float* source, float* target);

  device::Gpu& gpu_;
  const ParameterMap& map_;
  const ModelConfig& c_;
  const size_t max_tokens_, max_length_;
  const uint32_t d_, f_, dim_, group_, q_width_, kv_width_, qkv_width_;
  std::unique_ptr<gpudirect::DeviceSlab> memory_;
  std::unique_ptr<gpudirect::RegisteredPages> pinned_inputs_;
  std::unique_ptr<gpudirect::RegisteredPages> pinned_losses_;  // [2][tokens]: sums, margins
  std::vector<gpudirect::Event> events_;
  std::vector<Final> finals_;
  Scratch scratch_;
  Inputs there_;  // on the device
  Call call_;
};

}  // namespace baton::engine::train
