// The verifier: proves by symbolic execution that a schedule computes its collective.
//
// Every value is the multiset of contributions it is made of (and, for ordered schedules, the order
// in which they were combined). All ranks run against each other with channels that hold
// kMessagesAhead messages, as the executor's do. What blocks on such channels does not depend on
// timing, so one run proves the absence of deadlock.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "collectives/schedules/schedule.h"

namespace baton::collectives::proof {

// Above 64 ranks only so many parts are followed (all messages are still matched), with
// contributions as random 128-bit fingerprints instead of exact sets.
inline constexpr uint32_t kSampledParts = 8;

// The message costs of a schedule, counted while it ran.
struct VerifyReport {
  uint64_t messages = 0;            // of all ranks, for one piece
  uint32_t rounds = 0;              // the longest chain of messages that wait for each other
  uint64_t most_parts_sent = 0;     // by one rank: its bytes on the wire, in parts
  uint64_t most_parts_reduced = 0;  // by one rank
};

// OK and the report if, on every channel: each output part holds each contribution exactly once and
// nothing else (in rank order for ordered schedules), exactly one `final` step lies on the way of
// every reduced part, every message sent is received and of the size that is expected, nothing is
// read before it is written, no step overwrites what a send has not delivered yet without the
// executor being able to see it, and no rank waits for ever. Otherwise an error that names the
// rank, the step and the channel.
absl::StatusOr<VerifyReport> verify(const schedules::ScheduleSpec& spec,
                                    uint32_t sampled_parts = kSampledParts);

// The same for schedules that are not ours: `program(rank, channel)` is the rank's program.
using ProgramSource =
    std::function<absl::StatusOr<schedules::Program>(uint32_t rank, uint32_t channel)>;
absl::StatusOr<VerifyReport> verify(const schedules::ScheduleSpec& spec,
                                    const ProgramSource& program,
                                    uint32_t sampled_parts = kSampledParts);

}  // namespace baton::collectives::proof
