// The tuner: how a call of a shape is run.
//
// The cost model ranks candidates (algorithm, channels, chunk). The first calls of a shape try the
// best few, then all ranks vote, and the call is settled. Predictions rank candidates well and are
// never quite right: caches, other ranks on the same cores and kernels have their say.
//
// Which call tries what, and when the ranks vote, depends on the number of the call alone, so all
// ranks always run the same schedule. A call counts from take() on: one that is refused before that
// has changed nothing that other ranks would have to know.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "collectives/communicator.h"
#include "collectives/executor/prepared.h"
#include "collectives/prediction/cost_model.h"

namespace baton::collectives::internal {

// Everything under the communicator's lock.
class Tuner {
 public:
  struct Settings {
    uint32_t rank = 0;
    uint32_t ranks = 1;
    size_t slot_bytes = 0;
    bool tune = true;  // false: what the model predicts is taken
    // Short calls last as long as the kernel's scheduler decides: their times are no measurement.
    bool short_trials_mean_nothing = false;
  };

  // This rank's programs of one schedule.
  struct Programs {
    schedules::ScheduleSpec spec;
    bool in_place = false;
    uint32_t parts = 1;
    uint32_t max_message_parts = 1;
    size_t max_part_bytes = 0;  // so that a message fits into a slot of a link
    std::vector<executor::PreparedProgram> programs;  // by channel
  };

  // The measurements of calls of one shape. Only the tuner looks inside.
  class Entry;

  // How one call is run.
  struct Pick {
    const prediction::Choice* choice = nullptr;
    const Programs* programs = nullptr;
    uint32_t entry = UINT32_MAX;  // for measured()
    uint32_t candidate = 0;
  };

  Tuner(const Settings& settings, const prediction::CostParameters& cost);
  ~Tuner();
  Tuner(const Tuner&) = delete;
  Tuner& operator=(const Tuner&) = delete;

  // The entry of a shape: valid until the next call of entry_of().
  absl::StatusOr<Entry*> entry_of(const prediction::CallShape& shape,
                                  const prediction::Override& fixed);
  // The entry that it returned last; null: none, or it is stale.
  Entry* last() const { return last_; }

  // The step that is due before take(), once for each shape. kVote: combine votes(), by maximum
  // over all ranks, with the call that vote_began() is told of. kAwait: wait for that call, then
  // vote_ended().
  enum class Due { kNothing, kVote, kAwait };
  Due due(const Entry& entry) const;
  std::vector<double>& votes(Entry& entry);
  void vote_began(Entry& entry, Work vote);
  Work vote_of(const Entry& entry) const;
  void vote_ended(Entry& entry);

  // Counts the call, and says how it is run.
  absl::StatusOr<Pick> take(Entry& entry, bool in_place);

  // Whether the time that a call of this entry takes is still being compared.
  bool measuring(uint32_t entry) const;
  void measured(uint32_t entry, uint32_t candidate, double seconds);

  // New costs, measured in `took`: nothing is settled any more.
  void set_parameters(const prediction::CostParameters& cost, Time took);
  const prediction::CostParameters& parameters() const { return model_.parameters(); }

  // For people: every alternative with its predicted time, and what the last such call took.
  std::string explain(const prediction::CallShape& shape) const;

 private:
  struct Candidate;

  absl::StatusOr<std::vector<Candidate>> candidates_for(const prediction::CallShape& shape,
                                                        const prediction::Override& fixed) const;
  absl::StatusOr<const Programs*> programs(const schedules::ScheduleSpec& spec, bool in_place);

  const Settings settings_;
  prediction::CostModel model_;
  Time calibrated_in_{};
  std::vector<std::unique_ptr<Programs>> programs_;
  std::vector<Entry> entries_;
  size_t next_ = 0;  // of entries_, to be replaced once all are in use
  Entry* last_ = nullptr;
};

}  // namespace baton::collectives::internal
