// Packing weights for the kernels.
#include "engine/model/packed_layer.h"

namespace baton::engine {

PackedWeight pack(Arithmetic arithmetic, std::initializer_list<const Weight*> parts) {
  std::vector<uint16_t> rows;
  for (const Weight* part : parts) rows.insert(rows.end(), part->data.begin(), part->data.end());
  PackedWeight packed;
  packed.arithmetic = arithmetic;
  packed.k = (*parts.begin())->cols;
  for (const Weight* part : parts) packed.n += part->rows;
  const bool tiles = arithmetic == Arithmetic::kBf16;
  packed.data = AlignedArray<uint16_t>(tiles ? tiled_elements(packed.k, packed.n)
                                             : packed_elements(packed.k, packed.n));
  (tiles ? pack_tiles : pack_weight)(packed.k, packed.n, rows.data(), packed.data.data());
  return packed;
}

AlignedArray<float> widen(const Weight& weight) {
  AlignedArray<float> values(weight.data.size());
  for (size_t i = 0; i < weight.data.size(); ++i) values[i] = float_from_bf16(weight.data[i]);
  return values;
}

namespace {

// Vectors of a layer, one behind the other; nothing where the model has none.
std::vector<float> widen_if_there(const Checkpoint& checkpoint, int l,
                                  std::initializer_list<LayerWeight> kinds) {
  std::vector<float> values;
  for (const LayerWeight kind : kinds) {
    if (!has_weight(checkpoint.config, kind)) continue;
    for (const uint16_t bits : checkpoint.layer(l, kind).data) {
      values.push_back(float_from_bf16(bits));
    }
  }
  return values;
}

}  // namespace

Layer make_layer(const Checkpoint& checkpoint, int l, Arithmetic arithmetic) {
  const auto weight = [&](LayerWeight kind) { return &checkpoint.layer(l, kind); };
  const auto vector = [&](std::initializer_list<LayerWeight> kinds) {
    return widen_if_there(checkpoint, l, kinds);
  };
  return {.input_norm = widen(*weight(kInputNorm)),
          .qkv = pack(arithmetic, {weight(kQuery), weight(kKey), weight(kValue)}),
          .output = pack(arithmetic, {weight(kOutput)}),
          .post_norm = widen(*weight(kPostNorm)),
          .gate_up = pack(arithmetic, {weight(kGate), weight(kUp)}),
          .down = pack(arithmetic, {weight(kDown)}),
          .qkv_bias = vector({kQueryBias, kKeyBias, kValueBias}),
          .output_bias = vector({kOutputBias}),
          .gate_up_bias = vector({kGateBias, kUpBias}),
          .down_bias = vector({kDownBias}),
          .query_norm = vector({kQueryNorm}),
          .key_norm = vector({kKeyNorm})};
}

}  // namespace baton::engine
