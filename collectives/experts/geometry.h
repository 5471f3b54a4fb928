// Where everything of a round lies in the windows of an Experts.
//
// Window of a rank:   masks [ranks]
//   and of each place (round % in_flight):
//   received  [source][list, rows]   a source's list ends where its rows begin: both are one run
//   outputs   [slots]
//   tables    [source][pairs]        the slots of that source's pairs: read by it, in place
//   sent      [target][list, rows]   what is put to a target; rows only as far as they are packed
// Where a rank cannot map another's memory, a second window has, of each place, what comes back:
//   returned  [expert rank][pairs]
//
// Nothing that two ranks write lies in one place: one that stood still may go on after it was
// masked, and write late.
//
// A pair is a token and one of its experts; those of a source for a rank are numbered by token and
// then by expert.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "collectives/experts.h"

namespace baton::collectives::experts {

inline constexpr int kMostTopK = 64;

// One rank's announcement of the rows that it has for another; `rows` entries follow.
struct ListHeader {
  uint64_t round = 0;
  uint32_t rows = 0;
  uint32_t pairs = 0;
};
// An entry: most_per_row experts of the target, from 0, as int16_t in ascending order; -1 behind
// the last.

class Geometry {
 public:
  Geometry() = default;
  Geometry(const ExpertsOptions& options, int of_rank, int of_ranks);

  size_t received(uint32_t place) const { return begin(place); }
  size_t rows_at(uint32_t place, uint32_t source) const {
    return received(place) + (source * region_rows_ + list_rows_) * row_stride;
  }
  // The number of a source's row `i` among all received rows of a place.
  uint32_t row_number(uint32_t source, size_t i) const {
    return static_cast<uint32_t>(source * region_rows_ + list_rows_ + i);
  }
  size_t outputs(uint32_t place) const { return begin(place) + outputs_at_; }
  size_t table(uint32_t place, uint32_t source) const {
    return begin(place) + tables_at_ + source * most_pairs * sizeof(uint32_t);
  }
  size_t sent_rows(uint32_t place, uint32_t target) const {
    return begin(place) + sent_at_ + target * sent_bytes_ + most_list;
  }
  size_t returned(uint32_t place, uint32_t expert_rank) const {
    return place * returned_bytes_ + expert_rank * most_pairs * value_bytes;
  }
  size_t list_bytes(size_t rows) const { return sizeof(ListHeader) + rows * entry_bytes; }
  uint32_t owner_of(int32_t expert) const { return static_cast<uint32_t>(expert) / local; }

  uint32_t rank = 0, ranks = 1;
  uint32_t local = 0;  // experts of a rank
  uint32_t top_k = 0;
  uint32_t most_per_row = 0;  // experts of one rank that a token can have
  uint32_t capacity = 0;
  size_t value_bytes = 0;    // of a row of `type`: of outputs, too
  size_t row_stride = 0;     // of received rows, which lie behind one another
  size_t scales_offset = 0;  // in one; 0: no fp8
  size_t entry_bytes = 0;
  size_t most_rows = 0;   // of one source for one rank
  size_t most_pairs = 0;  // likewise
  size_t most_list = 0;
  size_t slots = 0;
  size_t packed_bytes = 0;  // rows of so many bytes at most are packed behind their list
  size_t window_bytes = 0, returned_window_bytes = 0;

 private:
  size_t begin(uint32_t place) const { return first_place_ + place * place_bytes_; }
  size_t first_place_ = 0, place_bytes_ = 0;
  size_t list_rows_ = 0, region_rows_ = 0;  // before the rows of a source; from source to source
  size_t outputs_at_ = 0, tables_at_ = 0, sent_at_ = 0, sent_bytes_ = 0, returned_bytes_ = 0;
};

}  // namespace baton::collectives::experts
