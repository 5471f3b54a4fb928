// The cost model: predicts what each schedule would take, picks one, and says why.
//
// It knows schedules only by their shape (rounds, bytes on the wire, bytes combined, messages),
// which it counts once per spec, and the machine only by CostParameters, which the communicator
// measures when it starts and corrects by what it observes. All ranks hold the same parameters, so
// all make the same choice: it depends on nothing else, not on what was asked before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "collectives/schedules/schedule.h"

namespace baton::collectives::prediction {

// What one kind of link costs.
struct LinkCost {
  double alpha = 5e-6;     // seconds per message
  double beta = 1 / 10e9;  // seconds per byte, one direction
  bool operator==(const LinkCost&) const = default;
};

// What a machine and its links cost. Seconds and bytes.
struct CostParameters {
  LinkCost local;           // between ranks of one node
  LinkCost remote;          // between nodes
  double gamma = 1 / 10e9;  // seconds per byte combined by one rank
  double step = 0.5e-6;     // seconds of CPU per step of a program
  // Where ranks share cores: seconds until each of them has done one step, which every `alpha` has
  // in it once. 0: a rank has a core of its own.
  double shared_step = 0;
  uint32_t node_size = 1;  // ranks [k * node_size, ...) are on one node: `local` links
  // Bytes on local links are moved by the ranks' own cores (shared memory, loopback), which have no
  // time for anything else meanwhile. Not measured: known from the kind of link.
  bool cores_move_local = false;
  bool operator==(const CostParameters&) const = default;
};

// How a call is run: everything that is chosen.
struct Choice {
  schedules::ScheduleSpec spec;
  size_t part_bytes = 0;  // of one part in one piece
  double seconds = 0;     // predicted
};

// Choices that the caller fixes; the model makes the others.
struct Override {
  std::optional<Algorithm> algorithm = std::nullopt;
  uint32_t channels = 0;   // 0: choose
  size_t chunk_bytes = 0;  // of one message, at most; 0: choose
  bool operator==(const Override&) const = default;
};

// The properties of a call that decide the choice.
struct CallShape {
  Collective collective = Collective::kAllReduce;
  uint32_t ranks = 1;
  uint32_t root = 0;
  size_t bytes = 0;  // nccl-tests' size: of the whole vector
  size_t element_bytes = 4;
  bool ordered = false;
  bool uneven = false;  // blocks of different lengths: see takes_uneven_blocks()
  bool operator==(const CallShape&) const = default;
};

class CostModel {
 public:
  // `slot_bytes`: the largest message; `lanes`: pieces in flight.
  CostModel(CostParameters parameters, size_t slot_bytes, uint32_t lanes);

  const CostParameters& parameters() const { return parameters_; }
  void set_parameters(const CostParameters& parameters);

  // Every candidate, the fastest first; never empty. InvalidArgument for a call or an override that
  // no schedule serves.
  absl::StatusOr<std::vector<Choice>> candidates(const CallShape& call,
                                                 const Override& fixed = {}) const;
  // The first of the candidates.
  absl::StatusOr<Choice> choose(const CallShape& call, const Override& fixed = {}) const;

 private:
  CostParameters parameters_;
  size_t slot_bytes_;
  uint32_t lanes_;
};

// A table of the candidates for people: algorithm, channels, chunk, predicted; and, where it is
// known, what the chosen one took.
std::string explain(const CallShape& call, absl::Span<const Choice> candidates,
                    double actual_seconds = 0);

// Merges the measurements of all ranks into one set that all use: the median of each field. Invalid
// values (negative, infinite) are ignored; a field without valid values gets its default.
CostParameters agree(absl::Span<const CostParameters> measured);

// For sending: always kEncodedCostBytes bytes, little-endian. InvalidArgument for anything else;
// agree() sorts out values that are no costs.
inline constexpr size_t kEncodedCostBytes = 64;
std::string encode(const CostParameters& parameters);
absl::StatusOr<CostParameters> decode_cost_parameters(std::string_view bytes);

}  // namespace baton::collectives::prediction
