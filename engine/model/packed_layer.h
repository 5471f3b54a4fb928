// A checkpoint's weights as the kernels want them.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "engine/kernels/aligned.h"
#include "engine/kernels/bf16_gemm.h"
#include "engine/kernels/gemm.h"
#include "engine/model/checkpoint.h"
#include "engine/model/config.h"
#include "engine/model/shard.h"

namespace baton::engine {

// W [n][k] packed in bf16, as b() or as tiles().
struct WeightView {
  int k = 0;
  int n = 0;
  Arithmetic arithmetic = Arithmetic::kFp32;
  const uint16_t* data = nullptr;

  PackedB b() const { return {.k = k, .n = n, .bf16 = data, .panel_rows = static_cast<size_t>(k)}; }
  TiledB tiles() const { return {.k = k, .n = n, .data = data}; }
};

// One or more Hugging Face weights stacked along n, packed once; of experts all of a layer's, which
// have one shape, in one array.
struct PackedWeight {
  int k = 0;
  int n = 0;
  Arithmetic arithmetic = Arithmetic::kFp32;
  AlignedArray<uint16_t> data;
  size_t one = 0;  // elements of each

  WeightView view(int expert = 0) const {
    return {k, n, arithmetic, data.data() + static_cast<size_t>(expert) * one};
  }
  size_t bytes() const { return sizeof(uint16_t) * data.size(); }
};

// Absent ones are empty. Each n is a rank's share of the columns (engine/model/shard.h).
struct Layer {
  AlignedArray<float> input_norm;  // [d]
  PackedWeight qkv;                // n = (H + 2 KV) * head_dim
  PackedWeight output;             // n = d
  AlignedArray<float> post_norm;   // [d]
  PackedWeight router;             // n = E, whole at every rank and always for fp32
  PackedWeight gate_up;            // n = 2 F; of each expert, where there are some
  PackedWeight down;               // n = d; the same
  std::vector<float> qkv_bias;     // [n of qkv]
  std::vector<float> output_bias;  // [n of output]
  std::vector<float> gate_up_bias;
  std::vector<float> down_bias;   // [n of down]
  std::vector<float> query_norm;  // [head_dim]
  std::vector<float> key_norm;    // [head_dim]
};

// Stacks the shard's slices of weights that are multiplied with the same input.
PackedWeight pack(Arithmetic arithmetic, const ModelShard& shard,
                  std::initializer_list<const Weight*> parts);
AlignedArray<float> widen(const Weight& weight);
Layer make_layer(const Checkpoint& checkpoint, int l, Arithmetic arithmetic,
                 const ModelShard& shard);

}  // namespace baton::engine
