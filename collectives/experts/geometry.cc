// Sizes and places in the windows of an Experts.
#include "collectives/experts/geometry.h"

#include "collectives/reduce/reduce.h"

namespace baton::collectives::experts {
namespace {

constexpr size_t kPackedBytes = size_t{64} << 10;
constexpr size_t kAlignment = 64;

size_t aligned(size_t bytes, size_t to = kAlignment) { return (bytes + to - 1) / to * to; }

}  // namespace

Geometry::Geometry(const ExpertsOptions& options, int of_rank, int of_ranks)
    : rank(static_cast<uint32_t>(of_rank)),
      ranks(static_cast<uint32_t>(of_ranks)),
      local(static_cast<uint32_t>(options.experts / of_ranks)),
      top_k(static_cast<uint32_t>(options.top_k)),
      most_per_row(std::min(top_k, local)),
      capacity(static_cast<uint32_t>(options.capacity)) {
  const auto hidden = static_cast<size_t>(options.hidden);
  const auto tokens = static_cast<size_t>(options.max_tokens);
  value_bytes = hidden * size_of(options.type);
  row_stride = value_bytes;
  if (options.fp8) {
    scales_offset = aligned(hidden, sizeof(float));
    row_stride = scales_offset + reduce::scales_of(hidden) * sizeof(float);
  }
  entry_bytes = most_per_row * sizeof(int16_t);
  most_rows = tokens;
  most_pairs = tokens * most_per_row;
  slots = ranks * most_pairs;
  if (capacity > 0) {
    slots = size_t{local} * ranks * capacity;
    most_pairs = std::min(most_pairs, size_t{local} * capacity);
    most_rows = std::min(most_rows, most_pairs);
  }
  most_list = aligned(list_bytes(most_rows));
  list_rows_ = (most_list + row_stride - 1) / row_stride;
  region_rows_ = list_rows_ + most_rows;
  switch (options.mode) {
    case ExpertsMode::kLowLatency:
      packed_bytes = most_rows * row_stride;
      break;
    case ExpertsMode::kThroughput:
      packed_bytes = 0;
      break;
    default:
      packed_bytes = kPackedBytes;
  }
  if (options.fp8) packed_bytes = most_rows * row_stride;
  first_place_ = aligned(ranks * sizeof(uint32_t));
  outputs_at_ = aligned(ranks * region_rows_ * row_stride);
  tables_at_ = outputs_at_ + aligned(slots * value_bytes);
  sent_at_ = tables_at_ + aligned(ranks * most_pairs * sizeof(uint32_t));
  sent_bytes_ = aligned(most_list + std::min(packed_bytes, most_rows * row_stride));
  place_bytes_ = sent_at_ + ranks * sent_bytes_;
  returned_bytes_ = aligned(ranks * most_pairs * value_bytes);
  const auto places = static_cast<size_t>(options.in_flight);
  window_bytes = first_place_ + places * place_bytes_;
  returned_window_bytes = places * returned_bytes_;
}

}  // namespace baton::collectives::experts
