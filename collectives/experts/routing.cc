// Choices as lists, and lists as slots.
#include "collectives/experts/routing.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_format.h"
#include "collectives/reduce/reduce.h"

namespace baton::collectives::experts {

absl::Status Routing::set(const Geometry& geometry, int experts, int tokens,
                          absl::Span<const int32_t> chosen) {
  tokens_ = static_cast<size_t>(tokens);
  choices_.clear();
  begins_.assign(1, 0);
  rows_.resize(geometry.ranks);
  for (auto& rows : rows_) rows.clear();
  pairs_.assign(geometry.ranks, 0);
  if (geometry.capacity > 0) counts_.assign(static_cast<size_t>(experts), 0);
  const auto by_expert = [](const Choice& a, const Choice& b) { return a.expert < b.expert; };
  for (size_t token = 0; token < tokens_; ++token) {
    const size_t first = choices_.size();
    for (uint32_t number = 0; number < geometry.top_k; ++number) {
      const int32_t expert = chosen[token * geometry.top_k + number];
      if (expert < -1 || expert >= experts) {
        return absl::InvalidArgumentError(absl::StrFormat(
            "choice %u of token %u is expert %d: there are experts 0 to %d, and -1 for none",
            number, token, expert, experts - 1));
      }
      if (expert >= 0) choices_.push_back({expert, number});
    }
    std::sort(choices_.begin() + static_cast<ptrdiff_t>(first), choices_.end(), by_expert);
    begins_.push_back(choices_.size());
    for (size_t i = first; i < choices_.size(); ++i) {
      const int32_t expert = choices_[i].expert;
      if (i > first && choices_[i - 1].expert == expert) {
        return absl::InvalidArgumentError(
            absl::StrFormat("token %u names expert %d twice", token, expert));
      }
      const uint32_t target = geometry.owner_of(expert);
      if (rows_[target].empty() || rows_[target].back() != token) {
        rows_[target].push_back(static_cast<uint32_t>(token));
      }
      ++pairs_[target];
      if (geometry.capacity == 0 || ++counts_[static_cast<size_t>(expert)] <= geometry.capacity) {
        continue;
      }
      return absl::ResourceExhaustedError(
          absl::StrFormat("expert %d has more than the %u tokens of this rank that its capacity "
                          "allows: choose others, or make Experts with a higher capacity",
                          expert, geometry.capacity));
    }
  }
  return absl::OkStatus();
}

void Routing::write(const Geometry& geometry, uint32_t target, uint64_t round,
                    std::byte* list) const {
  const std::vector<uint32_t>& rows = rows_[target];
  const ListHeader header{round, static_cast<uint32_t>(rows.size()), pairs_[target]};
  std::memcpy(list, &header, sizeof header);
  list += sizeof header;
  const int32_t first = static_cast<int32_t>(target * geometry.local);
  for (const uint32_t token : rows) {
    const absl::Span<const Choice> choices = of(token);
    size_t i = 0;
    while (geometry.owner_of(choices[i].expert) != target) ++i;
    for (uint32_t n = 0; n < geometry.most_per_row; ++n, ++i) {
      const bool here = i < choices.size() && geometry.owner_of(choices[i].expert) == target;
      const auto expert = static_cast<int16_t>(here ? choices[i].expert - first : -1);
      std::memcpy(list + n * sizeof expert, &expert, sizeof expert);
    }
    list += geometry.entry_bytes;
  }
}

void Slots::begin(const Geometry& geometry) {
  begins_.assign(geometry.ranks + 1, 0);
  experts_.clear();
  rows_.clear();
  next_.assign(geometry.local, 0);
}

absl::Status Slots::add(const Geometry& geometry, uint32_t source, uint64_t round, size_t rows,
                        const std::byte* first_row) {
  const auto wrong = [&](const char* what) {
    return absl::DataLossError(absl::StrFormat(
        "rank %u has sent a list of rows that cannot be (%s): use the same version of Baton at all "
        "ranks",
        source, what));
  };
  if (rows > geometry.most_rows) return wrong("it has more rows than a rank has tokens");
  const std::byte* list = first_row - geometry.list_bytes(rows);
  ListHeader header;
  std::memcpy(&header, list, sizeof header);
  if (header.round != round) return wrong("it is of another round");
  if (header.rows != rows) return wrong("it has another length than was announced");
  list += sizeof header;
  for (size_t row = 0; row < rows; ++row, list += geometry.entry_bytes) {
    int last = -1;
    uint32_t n = 0;
    for (; n < geometry.most_per_row; ++n) {
      int16_t expert;
      std::memcpy(&expert, list + n * sizeof expert, sizeof expert);
      if (expert == -1) break;
      if (expert <= last || static_cast<uint32_t>(expert) >= geometry.local) {
        return wrong("its experts do not ascend");
      }
      last = expert;
      experts_.push_back(expert);
      rows_.push_back(geometry.row_number(source, row));
      if (++next_[static_cast<size_t>(expert)] > size_t{geometry.ranks} * geometry.capacity &&
          geometry.capacity > 0) {
        return wrong("it has more tokens for an expert than its capacity");
      }
    }
    if (n == 0) return wrong("a row is for no expert");
  }
  if (experts_.size() - begins_[source] != header.pairs || header.pairs > geometry.most_pairs) {
    return wrong("it has another number of experts than was announced");
  }
  std::fill(begins_.begin() + source + 1, begins_.end(), experts_.size());
  return absl::OkStatus();
}

void Slots::finish(const Geometry& geometry, std::byte* window, uint32_t place) {
  groups_.clear();
  uint32_t first = 0;
  for (uint32_t expert = 0; expert < geometry.local; ++expert) {
    if (geometry.capacity > 0) first = expert * geometry.ranks * geometry.capacity;
    const uint32_t count = next_[expert];
    groups_.push_back({static_cast<int>(geometry.rank * geometry.local + expert),
                       static_cast<int>(first), static_cast<int>(count)});
    next_[expert] = first;
    first += count;
  }
  row_of_.assign(geometry.capacity > 0 ? geometry.slots : first, 0);
  slot_of_.resize(experts_.size());
  for (size_t pair = 0; pair < experts_.size(); ++pair) {
    const uint32_t slot = next_[static_cast<size_t>(experts_[pair])]++;
    slot_of_[pair] = slot;
    row_of_[slot] = rows_[pair];
  }
  for (uint32_t source = 0; source < geometry.ranks; ++source) {
    if (pairs(source) == 0) continue;
    std::memcpy(window + geometry.table(place, source), slots(source).data(),
                pairs(source) * sizeof(uint32_t));
  }
}

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
