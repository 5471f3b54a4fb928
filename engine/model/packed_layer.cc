// Packing weights for the kernels.
#include "engine/model/packed_layer.h"

namespace baton::engine {

PackedWeight pack(Arithmetic arithmetic, const ModelShard& shard,
                  std::initializer_list<const Weight*> parts) {
  std::vector<uint16_t> rows;
  PackedWeight packed;
  packed.arithmetic = arithmetic;
  packed.k = (*parts.begin())->cols;
  for (const Weight* part : parts) {
    const Slice slice = slice_of(part->rows, shard);
    const uint16_t* data = part->data.data();
    rows.insert(rows.end(), data + size_t(slice.begin) * packed.k,
                data + size_t(slice.end) * packed.k);
    packed.n += slice.size();
  }
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

// The shard's slices of a layer's vectors, one behind the other; nothing where the model has none.
std::vector<float> widen_if_there(const Checkpoint& checkpoint, int l, const ModelShard& shard,
                                  std::initializer_list<LayerWeight> kinds) {
  std::vector<float> values;
  for (const LayerWeight kind : kinds) {
    if (!has_weight(checkpoint.config, kind)) continue;
    const std::vector<uint16_t>& data = checkpoint.layer(l, kind).data;
    const Slice slice = slice_of(static_cast<int>(data.size()), shard);
    for (int i = slice.begin; i < slice.end; ++i) {
      values.push_back(float_from_bf16(data[size_t(i)]));
    }
  }
  return values;
}

}  // namespace

Layer make_layer(const Checkpoint& checkpoint, int l, Arithmetic arithmetic,
                 const ModelShard& shard) {
  const auto weight = [&](LayerWeight kind) { return &checkpoint.layer(l, kind); };
  const auto vector = [&](std::initializer_list<LayerWeight> kinds) {
    return widen_if_there(checkpoint, l, shard, kinds);
  };
  const auto of_every_head = [&](LayerWeight kind) {
    return widen_if_there(checkpoint, l, ModelShard{}, {kind});
  };
  return {.input_norm = widen(*weight(kInputNorm)),
          .qkv = pack(arithmetic, shard, {weight(kQuery), weight(kKey), weight(kValue)}),
          .output = pack(arithmetic, shard, {weight(kOutput)}),
          .post_norm = widen(*weight(kPostNorm)),
          .gate_up = pack(arithmetic, shard, {weight(kGate), weight(kUp)}),
          .down = pack(arithmetic, shard, {weight(kDown)}),
          .qkv_bias = vector({kQueryBias, kKeyBias, kValueBias}),
          .output_bias = vector({kOutputBias}),
          .gate_up_bias = vector({kGateBias, kUpBias}),
          .down_bias = vector({kDownBias}),
          .query_norm = of_every_head(kQueryNorm),
          .key_norm = of_every_head(kKeyNorm)};
}

}  // namespace baton::engine
