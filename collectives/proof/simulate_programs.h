// The programs of all ranks in the form that the simulator reads: 16 bytes a step, with the two
// ends of every message joined.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "collectives/proof/verify.h"
#include "collectives/schedules/schedule.h"

namespace baton::collectives::proof {

// One step. Its bytes are those of parts [part, part + parts) of the piece; scratch parts are full.
struct SimulatedStep {
  static constexpr uint32_t kScratchPart = (1u << 28) - 1;
  uint32_t kind : 4;   // Step::Kind
  uint32_t part : 28;  // or kScratchPart
  uint32_t parts = 0;  // how many to move; to combine, for kReduce, kCopy and kFold
  uint32_t pair = 0;   // of a message, in SimulatedPrograms::pairs
};

// All messages from one rank to another, in one lane, are a queue.
struct SimulatedPair {
  uint32_t source = 0;
  uint32_t target = 0;
};

struct SimulatedPrograms {
  uint32_t ranks = 0;
  uint32_t channels = 0;
  uint32_t parts = 1;   // of a piece
  bool blocks = false;  // one block per rank: all parts of a piece are alike
  std::vector<SimulatedStep> steps;
  std::vector<size_t> starts;  // of rank r on channel c: [r * channels + c], and the end of it all
  std::vector<SimulatedPair> pairs;

  // How the bytes of a call are cut into pieces of `parts` parts.
  struct Cut {
    size_t bytes = 0;       // of the vector, or of one block
    size_t part_bytes = 0;  // of a full part
    size_t pieces = 1;
  };
  Cut cut(size_t bytes, size_t piece_bytes) const;
  // What a step of this piece moves or combines.
  size_t bytes_of(const SimulatedStep& step, const Cut& cut, size_t piece) const {
    if (step.part == SimulatedStep::kScratchPart) return step.parts * cut.part_bytes;
    const size_t first = (blocks ? piece : piece * parts + step.part) * cut.part_bytes;
    const size_t left = first < cut.bytes ? cut.bytes - first : 0;
    if (blocks) return step.parts * std::min(left, cut.part_bytes);
    // A fold reads its one part from many ranks; all else is a range of the vector.
    if (step.kind == static_cast<uint32_t>(schedules::Step::Kind::kFold)) {
      return step.parts * std::min(left, cut.part_bytes);
    }
    return std::min(left, step.parts * cut.part_bytes);
  }
};

// The programs of these ranks (all of them: `ranks` empty) on the first `channels` channels.
// InvalidArgument where a step names a rank or a part that does not exist.
absl::StatusOr<SimulatedPrograms> read_programs(const schedules::ScheduleSpec& spec,
                                                const ProgramSource& program, uint32_t channels);

}  // namespace baton::collectives::proof
