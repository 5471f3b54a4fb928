// Routes rows: turns the choices of this rank's tokens into lists for the other ranks, and their
// lists into slots of this rank's experts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "collectives/experts/geometry.h"

namespace baton::collectives::experts {

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
