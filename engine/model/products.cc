// Products with packed weights, and what ranks exchange of them.
#include <algorithm>

#include "engine/model/model_impl.h"

namespace baton::engine {

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
