// Puts a checkpoint's weights one behind the other into one slab.
#include "engine/device/device_weights.h"

#include <initializer_list>

#include "engine/kernels/aligned.h"

namespace baton::engine::device {
namespace {

// Says where weights lie; and puts them there, unless it is only to measure.
class Placer {
 public:
  Placer() = default;
  Placer(Gpu& gpu, gpudirect::DevicePointer base) : gpu_(&gpu), carver_(base) {}

  // Stacked, in bf16.
  const uint16_t* halves(std::initializer_list<const Weight*> weights) {
    size_t count = 0;
    for (const Weight* weight : weights) count += weight->data.size();
    uint16_t* const at = carver_.take<uint16_t>(count);
    size_t done = 0;
    for (const Weight* weight : weights) {
      put(at + done, weight->data.data(), weight->data.size() * sizeof(uint16_t));
      done += weight->data.size();
    }
    return at;
  }
  // Stacked, in fp32.
  const float* floats(std::initializer_list<const Weight*> weights) {
    std::vector<float> values;
    for (const Weight* weight : weights) {
      for (const uint16_t half : weight->data) values.push_back(float_from_bf16(half));
    }
    float* const at = carver_.take<float>(values.size());
    put(at, values.data(), values.size() * sizeof(float));
    return at;
  }
  const absl::Status& status() const { return status_; }
  size_t used() const { return carver_.used(); }

 private:
  void put(const void* to, const void* from, size_t bytes) {
    if (gpu_ != nullptr && status_.ok()) status_ = gpu_->upload(address_of(to), from, bytes);
  }

  Gpu* gpu_ = nullptr;
  Carver carver_;
  absl::Status status_;
};

DeviceLayer place_layer(const Checkpoint& checkpoint, int l, Placer& placer) {
  const auto weight = [&](LayerWeight kind) { return &checkpoint.layer(l, kind); };
  const auto vector = [&](LayerWeight kind) -> const float* {
    return has_weight(checkpoint.config, l, kind) ? placer.floats({weight(kind)}) : nullptr;
  };
  DeviceLayer layer;
  layer.input_norm = vector(kInputNorm);
  layer.query = placer.halves({weight(kQuery)});
  layer.key = placer.halves({weight(kKey)});
  layer.value = placer.halves({weight(kValue)});
  layer.output = placer.halves({weight(kOutput)});
  layer.post_norm = vector(kPostNorm);
  layer.gate_up = placer.halves({weight(kGate), weight(kUp)});
  layer.down = placer.halves({weight(kDown)});
  layer.query_bias = vector(kQueryBias);
  layer.key_bias = vector(kKeyBias);
  layer.value_bias = vector(kValueBias);
  layer.output_bias = vector(kOutputBias);
  if (has_weight(checkpoint.config, l, kGateBias)) {
    layer.gate_up_bias = placer.floats({weight(kGateBias), weight(kUpBias)});
  }
  layer.down_bias = vector(kDownBias);
  layer.query_norm = vector(kQueryNorm);
  layer.key_norm = vector(kKeyNorm);
  return layer;
}

DeviceWeights place(const Checkpoint& checkpoint, Placer& placer) {
  DeviceWeights weights;
  weights.embedding = placer.halves({&checkpoint.embedding()});
  for (int l = 0; l < checkpoint.config.num_layers; ++l) {
    weights.layers.push_back(place_layer(checkpoint, l, placer));
  }
  weights.final_norm = placer.floats({&checkpoint.final_norm()});
  weights.lm_head = checkpoint.config.tie_word_embeddings ? weights.embedding
                                                          : placer.halves({&checkpoint.lm_head()});
  return weights;
}

}  // namespace

absl::StatusOr<DeviceWeights> DeviceWeights::upload(Gpu& gpu, const Checkpoint& checkpoint) {
  if (absl::Status status = checkpoint.config.validate(); !status.ok()) return status;
  if (checkpoint.config.num_experts > 0) {
    return absl::UnimplementedError(
        "a mixture of experts does not run on a device yet: compute it with --device cpu");
  }
  Placer measure;
  place(checkpoint, measure);
  auto memory = gpudirect::DeviceSlab::create(gpu.device(), measure.used(),
                                              {.rdma = false, .shareable = false});
  if (!memory.ok()) return memory.status();
  Placer placer(gpu, (*memory)->span().data);
  DeviceWeights weights = place(checkpoint, placer);
  if (!placer.status().ok()) return placer.status();
  weights.memory = *std::move(memory);
  return weights;
}

}  // namespace baton::engine::device
