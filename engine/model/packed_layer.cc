// Packing weights for the kernels.
#include "engine/model/packed_layer.h"

#include <algorithm>
#include <span>
#include <utility>

#include "engine/model/model_impl.h"

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

// Products with packed weights, and what ranks exchange of them.

void Model::Impl::multiply(Workspace::Impl& w, int rows, const float* a, size_t lda,
                           const WeightView& weight, float* out, size_t ldc, bool accumulate) {
  if (weight.n == 0) return;  // a rank without a slice
  if (weight.arithmetic == Arithmetic::kBf16) {
    gemm_bf16(*w.pool, w.bf16_scratch, rows, a, lda, weight.tiles(), out, ldc, accumulate);
  } else {
    gemm(*w.pool, w.gemm_scratch, rows, {a, lda, 1}, weight.b(), out, ldc, accumulate);
  }
}

void Model::Impl::multiply_experts(Workspace::Impl& w, std::span<const ExpertTable::Group> groups,
                                   const float* a, size_t lda, const PackedWeight& weight,
                                   float* out, size_t ldc) {
  for (const ExpertTable::Group& group : groups) {
    const size_t first = static_cast<size_t>(group.first);
    multiply(w, group.count, a + first * lda, lda, weight.view(group.expert), out + first * ldc,
             ldc, false);
  }
}

absl::Status Model::Impl::gather(Workspace::Impl& w, int rows, const float* own, size_t stride,
                                 int columns, float* out) const {
  const size_t width = static_cast<size_t>(slice_width(columns, shard.ranks));
  const size_t part = static_cast<size_t>(rows) * width;
  const Slice mine = slice_of(columns, shard);
  float* to = w.exchanged + static_cast<size_t>(shard.rank) * part;
  for_rows(*w.pool, rows,
           [&](size_t row) { std::copy_n(own + row * stride, mine.size(), to + row * width); });
  if (absl::Status status = w.exchange->all_gather(w.exchanged, part); !status.ok()) return status;
  for_rows(*w.pool, rows, [&](size_t row) {
    for (int rank = 0; rank < shard.ranks; ++rank) {
      const Slice slice = slice_of(columns, {rank, shard.ranks});
      std::copy_n(w.exchanged + static_cast<size_t>(rank) * part + row * width, slice.size(),
                  out + row * static_cast<size_t>(columns) + slice.begin);
    }
  });
  return absl::OkStatus();
}

absl::Status Model::Impl::add_to_x(Workspace::Impl& w, int rows, const float* own, size_t stride,
                                   int columns, const WeightView& weight,
                                   const std::vector<float>& bias) const {
  const float* input = own;
  if (!shard.whole()) {
    absl::Status status = gather(w, rows, own, stride, columns, w.gathered.data());
    if (!status.ok()) return status;
    input = w.gathered.data();
    stride = static_cast<size_t>(columns);
  }
  const size_t d = static_cast<size_t>(config.hidden_size);
  float* x = w.x.data() + of_x().begin;
  multiply(w, rows, input, stride, weight, x, d, true);
  if (!bias.empty()) for_rows(*w.pool, rows, [&](size_t row) { add_bias(bias, x + row * d); });
  return shard.whole() ? absl::OkStatus() : gather(w, rows, x, d, config.hidden_size, w.x.data());
}

}  // namespace baton::engine
