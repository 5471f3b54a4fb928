// The cost model: predicts what each schedule would take, picks one, and says why.
//
// It knows schedules only by their shape (rounds, bytes on the wire, bytes combined, messages),
// which it counts once per spec, and the machine only by CostParameters, which the communicator
// measures when it starts and corrects by what it observes. All ranks hold the same parameters, so
// all make the same choice.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "collectives/schedule.h"
#include "collectives/simulate.h"

namespace baton::collectives {

// How a call is run: everything that is chosen.
struct Choice {
  ScheduleSpec spec;
  size_t part_bytes = 0;  // of one part in one piece
  double seconds = 0;     // predicted
};

// What the caller fixes; the rest is chosen.
struct Override {
  bool has_algorithm = false;
  Algorithm algorithm = Algorithm::kRing;
  uint32_t channels = 0;   // 0: choose
  size_t chunk_bytes = 0;  // of one message; 0: choose
  bool operator==(const Override&) const = default;
};

// What a call is, as far as choosing goes.
struct CallShape {
  Collective collective = Collective::kAllReduce;
  uint32_t ranks = 1;
  uint32_t root = 0;
  uint32_t peer = 0;  // of send_receive
  size_t bytes = 0;   // nccl-tests' size: of the whole vector
  size_t element_bytes = 4;
  bool ordered = false;
  bool operator==(const CallShape&) const = default;
};

class CostModel {
 public:
  // `slot_bytes`: the largest message; `lanes`: pieces in flight.
  CostModel(CostParameters parameters, size_t slot_bytes, uint32_t lanes);

  const CostParameters& parameters() const { return parameters_; }
  void set_parameters(const CostParameters& parameters) { parameters_ = parameters; }

  // Seconds for this choice. InvalidArgument where the schedule does not exist.
  absl::StatusOr<double> predict(const CallShape& call, const Choice& choice) const;
  // Every candidate, the fastest first.
  absl::StatusOr<std::vector<Choice>> candidates(const CallShape& call,
                                                 const Override& fixed = {}) const;
  absl::StatusOr<Choice> choose(const CallShape& call, const Override& fixed = {}) const;

 private:
  CostParameters parameters_;
  size_t slot_bytes_;
  uint32_t lanes_;
};

// What ranks measured, taken together: what all of them use. At least one.
CostParameters agree(absl::Span<const CostParameters> measured);
// For sending; all ranks have the same form.
std::string encode(const CostParameters& parameters);
absl::StatusOr<CostParameters> decode_cost_parameters(std::string_view bytes);

// A table of the candidates for people: algorithm, channels, chunk, predicted; and, where it is
// known, what the chosen one took.
std::string explain(const CallShape& call, absl::Span<const Choice> candidates,
                    double actual_seconds = 0);

}  // namespace baton::collectives
