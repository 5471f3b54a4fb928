// A checkpoint's weights in the memory of a device, as files have them: [out][in] in bf16, norms
// and biases in fp32.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/device/gpu.h"
#include "engine/model/checkpoint.h"

namespace baton::engine::device {

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

}  // namespace baton::engine::device
