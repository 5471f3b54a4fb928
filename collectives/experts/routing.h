// Routes rows: turns the choices of this rank's tokens into lists for the other ranks, and their
// lists into slots of this rank's experts.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "collectives/experts.h"

namespace baton::collectives::experts {

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

// The choices of one dispatch. Its memory is reused.
class Routing {
 public:
  struct Choice {
    int32_t expert = 0;
    uint32_t number = 0;  // among the token's choices as the caller gave them
  };

  // InvalidArgument, ResourceExhausted: as of Experts::dispatch_async().
  absl::Status set(const Geometry& geometry, int experts, int tokens,
                   absl::Span<const int32_t> chosen);

  size_t tokens() const { return tokens_; }
  // A token's choices, in ascending number of the expert.
  absl::Span<const Choice> of(size_t token) const {
    return {choices_.data() + begins_[token], begins_[token + 1] - begins_[token]};
  }
  // The tokens that go to that rank, ascending.
  const std::vector<uint32_t>& rows(uint32_t target) const { return rows_[target]; }
  // Writes the list for that rank, list_bytes() of its rows long.
  void write(const Geometry& geometry, uint32_t target, uint64_t round, std::byte* list) const;

 private:
  size_t tokens_ = 0;
  std::vector<Choice> choices_;
  std::vector<size_t> begins_;  // [tokens + 1]
  std::vector<std::vector<uint32_t>> rows_;
  std::vector<uint32_t> pairs_;   // [ranks]
  std::vector<uint32_t> counts_;  // [experts], where there is a capacity
};

// The rows of one round, by expert. Its memory is reused.
class Slots {
 public:
  void begin(const Geometry& geometry);
  // The list that has come from `source` before its `rows` rows at `first_row`, in ascending order
  // of the sources. DataLoss: no rank of this group writes such a list.
  absl::Status add(const Geometry& geometry, uint32_t source, uint64_t round, size_t rows,
                   const std::byte* first_row);
  // When all are there. Writes each source's slots to table(source).
  void finish(const Geometry& geometry, std::byte* window, uint32_t place);

  const std::vector<ExpertGroup>& groups() const { return groups_; }
  const std::vector<uint32_t>& row_of() const { return row_of_; }
  // For each pair of a source, in their order: the slot here.
  absl::Span<const uint32_t> slots(uint32_t source) const {
    return absl::Span<const uint32_t>(slot_of_).subspan(begins_[source], pairs(source));
  }

 private:
  size_t pairs(uint32_t source) const { return begins_[source + 1] - begins_[source]; }

  std::vector<size_t> begins_;            // [ranks + 1]
  std::vector<int16_t> experts_;          // of each pair
  std::vector<uint32_t> rows_, slot_of_;  // of each pair
  std::vector<uint32_t> next_;            // of each expert
  std::vector<ExpertGroup> groups_;
  std::vector<uint32_t> row_of_;
};

}  // namespace baton::collectives::experts
