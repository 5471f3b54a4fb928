// Packing weights for the kernels.
#include "engine/model/packed_layer.h"

#include <span>
#include <utility>

namespace baton::engine {

namespace {

// Packs one weight after another into one array.
class Packer {
 public:
  // Packs weights made of `parts` like these.
  Packer(Arithmetic arithmetic, const ModelShard& shard, std::initializer_list<const Weight*> parts,
         int count = 1)
      : shard_(shard) {
    packed_.arithmetic = arithmetic;
    packed_.k = (*parts.begin())->cols;
    for (const Weight* part : parts) packed_.n += slice_of(part->rows, shard).size();
    const auto of_all = static_cast<size_t>(count);
    packed_.one = arithmetic == Arithmetic::kBf16 ? tiled_elements(packed_.k, packed_.n)
                                                  : packed_elements(packed_.k, packed_.n);
    packed_.data = AlignedArray<uint16_t>(packed_.one * of_all);
  }
  void add(std::initializer_list<const Weight*> parts) {
    rows_.clear();
    for (const Weight* part : parts) {
      const Slice slice = slice_of(part->rows, shard_);
      const uint16_t* data = part->data.data();
      rows_.insert(rows_.end(), data + size_t(slice.begin) * packed_.k,
                   data + size_t(slice.end) * packed_.k);
    }
    const size_t at = done_++;
    const bool tiles = packed_.arithmetic == Arithmetic::kBf16;
    (tiles ? pack_tiles : pack_weight)(packed_.k, packed_.n, rows_.data(),
                                       packed_.data.data() + at * packed_.one);
  }
  PackedWeight take() { return std::move(packed_); }

 private:
  const ModelShard shard_;
  PackedWeight packed_;
  size_t done_ = 0;
  std::vector<uint16_t> rows_;
};

}  // namespace

PackedWeight pack(Arithmetic arithmetic, const ModelShard& shard,
                  std::initializer_list<const Weight*> parts) {
  Packer packer(arithmetic, shard, parts);
  packer.add(parts);
  return packer.take();
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
    if (!has_weight(checkpoint.config, l, kind)) continue;
    const std::vector<uint16_t>& data = checkpoint.layer(l, kind).data;
    const Slice slice = slice_of(static_cast<int>(data.size()), shard);
    for (int i = slice.begin; i < slice.end; ++i) {
      values.push_back(float_from_bf16(data[size_t(i)]));
    }
  }
  return values;
}

// The router and the experts.
void add_experts(const Checkpoint& checkpoint, int l, Arithmetic arithmetic,
                 const ModelShard& shard, Layer& layer) {
  layer.router = pack(Arithmetic::kFp32, ModelShard{}, {&checkpoint.layer(l, kRouter)});
  const std::span<const Weight> first = checkpoint.experts(l);
  // Columns of every expert, or some experts whole.
  const ModelShard columns = shard.expert_parallel ? ModelShard{} : shard;
  const int count = checkpoint.config.num_experts / (shard.expert_parallel ? shard.ranks : 1);
  const size_t begin =
      shard.expert_parallel ? static_cast<size_t>(shard.rank * count) * kPerExpert : 0;
  const size_t end = begin + static_cast<size_t>(count) * kPerExpert;
  Packer gate_up(arithmetic, columns, {&first[kExpertGate], &first[kExpertUp]}, count);
  Packer down(arithmetic, columns, {&first[kExpertDown]}, count);
  for (size_t at = begin; at < end; at += kPerExpert) {
    gate_up.add({&first[at + kExpertGate], &first[at + kExpertUp]});
    down.add({&first[at + kExpertDown]});
  }
  layer.gate_up = gate_up.take();
  layer.down = down.take();
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
  Layer layer{.input_norm = widen(*weight(kInputNorm)),
              .qkv = pack(arithmetic, shard, {weight(kQuery), weight(kKey), weight(kValue)}),
              .output = pack(arithmetic, shard, {weight(kOutput)}),
              .post_norm = widen(*weight(kPostNorm)),
              .qkv_bias = vector({kQueryBias, kKeyBias, kValueBias}),
              .output_bias = vector({kOutputBias}),
              .gate_up_bias = vector({kGateBias, kUpBias}),
              .down_bias = vector({kDownBias}),
              .query_norm = of_every_head(kQueryNorm),
              .key_norm = of_every_head(kKeyNorm)};
  if (checkpoint.config.has_experts(l)) {
    add_experts(checkpoint, l, arithmetic, shard, layer);
  } else {
    layer.gate_up = pack(arithmetic, shard, {weight(kGate), weight(kUp)});
    layer.down = pack(arithmetic, shard, {weight(kDown)});
  }
  return layer;
}

}  // namespace baton::engine
