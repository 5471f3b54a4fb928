// Schedules: what each rank does in a collective, as data.
//
// An algorithm is a pure function that writes one rank's Program for one *piece* of the data. The
// executor runs it over any provider, a test proves that it computes its collective
// (tests/schedules/verify.h), the cost model predicts it. None of them knows any algorithm.
//
// Data. Elements are independent, so a call is cut into pieces and every piece runs the whole
// program by itself; pieces in flight together are the pipeline. A piece consists of `parts`:
//
//   all_reduce, broadcast, reduce   a contiguous range of the vector, cut into parts_of(spec) equal
//                                   parts (the last ones may be short or empty)
//   reduce_scatter                  input: part p is what rank p will own; output: part `rank` only
//   all_gather                      input: part `rank` only; output: part p came from rank p
//   all_to_all                      input part p goes to rank p; output part p came from rank p
//   gather                          input: part `rank` only; output at `root`: p came from rank p
//   scatter                         input at `root`: p goes to rank p; output: part `rank` only
//   barrier                         no data: messages of no parts
//
// Messages. A rank's programs of one lane run one after the other, and the j-th message it sends to
// a peer is the j-th that the peer receives from it: there are no tags. A sender may be
// kMessagesAhead messages ahead of a receiver and blocks after that.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "collectives/types.h"

namespace baton::collectives::schedules {

// How many messages a sender may be ahead of one receiver, within one lane.
inline constexpr uint32_t kMessagesAhead = 2;

enum class BufferName : uint8_t {
  kInput,    // the caller's, never written (unless the call is in place: then it is kOutput)
  kOutput,   // the caller's
  kScratch,  // the executor's, `scratch_parts` parts for each piece in flight
};

// Where a step finds or leaves data: `parts` (of the step) consecutive parts from `part` on.
struct Place {
  BufferName buffer = BufferName::kInput;
  uint32_t part = 0;
  bool operator==(const Place&) const = default;
};

struct Step {
  enum class Kind : uint8_t {
    kSend,           // source -> peer
    kReceive,        // peer -> target
    kReceiveReduce,  // target = source (+) what came from peer; source may be target
    kCopy,           // target = source
    kFold,           // target = the contributions of all ranks, combined in rank order; one part.
                     // Rank i's contribution lies in scratch part source.part + i, our own in
                     // input part target.part. 16-bit floats are combined in f32, rounded once.
  };
  Kind kind = Kind::kSend;
  bool final = false;  // the last combination of these parts anywhere: kAvg divides here
  uint32_t peer = 0;   // of kSend, kReceive, kReceiveReduce
  uint32_t parts = 1;  // how many; 0 in barriers
  Place source;
  Place target;
};

struct Program {
  std::vector<Step> steps;
  uint32_t scratch_parts = 0;
  // The largest number of parts in one message anywhere in this schedule, the same at all ranks.
  uint32_t max_message_parts = 1;
};

// Selects a schedule. All ranks of a call pass the same.
struct ScheduleSpec {
  Collective collective = Collective::kAllReduce;
  Algorithm algorithm = Algorithm::kRing;
  uint32_t ranks = 1;
  uint32_t root = 0;       // broadcast, reduce, gather, scatter
  uint32_t node_size = 1;  // hierarchical: ranks [k * node_size, (k + 1) * node_size) share a node;
                           // the last node may be smaller
  uint32_t channels = 1;   // variants that share the load: rings in both directions and with other
                           // strides, the two trees. Piece i runs channel i % channels.
  // Results do not depend on the algorithm, the cut or the placement: contributions are combined in
  // rank order, ((x0 + x1) + x2) + ... A schedule then carries contributions, and folds them.
  bool ordered = false;
  // This rank's input and output do not share memory, which spares two ranks a copy in all_reduce
  // by recursive doubling. Ranks need not agree: what goes over the wire is the same.
  bool separate = false;

  bool operator==(const ScheduleSpec&) const = default;
  std::string to_string() const;  // "all_reduce ring n=8 channels=2 ordered"
};

// OK if the spec names a schedule that exists (for example, ring all_to_all does not); otherwise
// why not and which algorithms do.
absl::Status validate(const ScheduleSpec& spec);

// The algorithms that implement this collective, the preferred one first. Sends and receives have
// none: they run by no schedule.
std::vector<Algorithm> algorithms_for(Collective collective, bool ordered = false);

// True if the blocks of all_gather and reduce_scatter may have different lengths (all_gather_v,
// reduce_scatter_v): a message is one part, and scratch holds parts of the rank's own block alone.
bool takes_uneven_blocks(const ScheduleSpec& spec);

// True for collectives with a root.
constexpr bool rooted(Collective collective) {
  return collective == Collective::kBroadcast || collective == Collective::kReduce ||
         collective == Collective::kGather || collective == Collective::kScatter;
}

// True for collectives that combine what ranks contribute.
constexpr bool reduces(Collective collective) {
  return collective == Collective::kAllReduce || collective == Collective::kReduceScatter ||
         collective == Collective::kReduce;
}

// How many parts a piece has. At least 1, of barriers too.
uint32_t parts_of(const ScheduleSpec& spec);

// The most parts that one message carries, anywhere: what a slot must hold. At least 1.
uint32_t max_message_parts(const ScheduleSpec& spec);

// The steps of `rank` on channel `channel` (< spec.channels). Takes time and memory in proportion
// to the rank's own steps: programs of thousands of ranks can be written one by one.
absl::StatusOr<Program> write_program(const ScheduleSpec& spec, uint32_t rank,
                                      uint32_t channel = 0);

}  // namespace baton::collectives::schedules
