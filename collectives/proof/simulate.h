// The simulator: runs the programs of a schedule in virtual time, thousands of ranks in one
// process, without moving a byte.
//
// The model is alpha-beta-gamma: a message of b bytes leaves its sender's port for b * beta, is
// there alpha after its last byte left, and its reduction takes the receiver b * gamma, as copying
// b bytes from buffer to buffer does. A rank has one port out and one port in for each class of
// link (see `contention`), and one core that reduces, copies and posts. A sender learns alpha after
// the end of the receiver's step that it may send one more message.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "collectives/proof/verify.h"
#include "collectives/schedules/schedule.h"

namespace baton::collectives::proof {

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
  // in it once. 0: a rank has a core of its own. The simulator's ranks always do.
  double shared_step = 0;
  uint32_t node_size = 1;  // ranks [k * node_size, ...) are on one node: `local` links
  // Bytes on local links are moved by the ranks' own cores (shared memory, loopback), which have no
  // time for anything else meanwhile. Not measured: known from the kind of link.
  bool cores_move_local = false;
  bool operator==(const CostParameters&) const = default;
};

struct SimulateOptions {
  CostParameters cost;
  size_t bytes = 0;               // of the vector: nccl-tests' size
  size_t piece_bytes = SIZE_MAX;  // cut the vector into pieces of this many bytes
  uint32_t lanes = 8;             // pieces in flight
  uint32_t messages_ahead = schedules::kMessagesAhead;
  // Off: every message has its own wire, as the closed formulas assume. On: messages of one rank
  // queue for its port of that class of link, out and in.
  bool contention = true;
  // Rank i starts so many seconds late; empty: all at once.
  std::vector<double> late;
};

struct SimulateReport {
  double seconds = 0;  // until the last rank is done
  uint64_t messages = 0;
  uint64_t most_bytes_sent = 0;  // by one rank
  uint64_t most_bytes_received = 0;
  std::vector<double> rank_seconds;  // when each was done: its last step, its last byte sent
};

// InvalidArgument for a spec that does not exist or options that make no sense; Internal, naming
// the rank and its step, for programs that wait for ever. Takes 16 bytes of memory per step of all
// ranks, and some for every pair of ranks that exchange messages, in every lane.
absl::StatusOr<SimulateReport> simulate(const schedules::ScheduleSpec& spec,
                                        const SimulateOptions& options);

// The same for schedules that are not ours: `program(rank, channel)` is the rank's program.
absl::StatusOr<SimulateReport> simulate(const schedules::ScheduleSpec& spec,
                                        const ProgramSource& program,
                                        const SimulateOptions& options);

}  // namespace baton::collectives::proof
