// The shape of a schedule: all that the cost model knows of it.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "collectives/prediction/cost_model.h"

namespace baton::collectives::prediction {

// What time is spent on.
enum Spent : int { kLocalAlpha, kRemoteAlpha, kLocalBytes, kRemoteBytes, kCombinedBytes, kSteps };
inline constexpr int kSpentKinds = 6;

// How often something costs each of these; bytes are counted in parts.
using Amounts = std::array<double, kSpentKinds>;

// The shape of one piece.
struct ScheduleShape {
  uint32_t parts = 1;
  uint32_t max_message_parts = 1;
  // Chains of work that wait for each other: a piece takes as long as the longest of them, and two
  // pieces one after the other in the same lane as long as the longest of the second kind.
  std::vector<Amounts> chains;
  std::vector<Amounts> chains_of_two;
  bool channels_differ = false;  // otherwise more than one is of no use
  // What one rank does and sends, and what it receives, averaged over channels: pieces in flight
  // together queue for it. Of the ranks that have most of something.
  std::vector<Amounts> loads;
  std::vector<Amounts> received;
  double mean_steps = 0;  // that a rank does
};

// The seconds that a schedule takes with parts of this many bytes.
struct PieceSeconds {
  double alone = 0;  // one piece with nothing else going on
  double next = 0;   // until the next piece in the same lane is done, too
  double busy = 0;   // of the busiest core or port: no faster can pieces of all lanes follow
};
PieceSeconds price(const ScheduleShape& shape, const CostParameters& cost, double part_bytes);

// Counts a shape from the programs of all ranks, under costs that are always the same, so that all
// ranks count alike. Schedules of very many steps are sampled: there a chain is what a single rank
// goes through. `node_size` says which links are local, whatever the spec says.
absl::StatusOr<ScheduleShape> count_shape(const schedules::ScheduleSpec& spec, uint32_t node_size);

}  // namespace baton::collectives::prediction
