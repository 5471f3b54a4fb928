// The failure detector: it notices failures and reports them to this rank's calls and to the other
// ranks.
//
// A rank that died, left, stopped, is late or called something else, and abort(), all end in
// fail(): every call ends with an error that names the rank, and the others are told.
#pragma once

#include <atomic>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "collectives/executor/executor.h"
#include "collectives/executor/flight_recorder.h"
#include "collectives/internal/call_table.h"
#include "collectives/internal/mesh.h"

namespace baton::collectives::internal {

// Everything under the communicator's lock, except is_broken().
class FailureDetector {
 public:
  // All outlive this. The group's name is for the file that the flight record is written to.
  FailureDetector(const CommunicatorOptions& options, Mesh& mesh,
                  executor::FlightRecorder& recorder)
      : group_(options.name), masks_lost_(options.mask_lost), mesh_(mesh), recorder_(recorder) {}
  // For a group that begins: nothing has failed.
  void watch(executor::Executor& executor, CallTable& calls);

  // OK, or why everything fails.
  const absl::Status& broken() const { return broken_; }
  // A call is about to begin: as broken(), and a rank that is lost breaks the group now.
  const absl::Status& begin_call() { return masks_lost_ ? begin_call_masking() : broken_; }
  bool is_broken() const { return is_broken_.load(std::memory_order_acquire); }
  // Ranks that are dead or stopped.
  const std::vector<bool>& lost() const { return lost_; }
  void mark_lost(uint32_t rank) { lost_[rank] = true; }

  // Everything fails from now on, and every call ends as soon as none of its bytes moves any more:
  // at once, or in end_calls(), which takes 30 ms at most. `culprit`: the rank that is to blame, or
  // our own. The others that are connected are told `said`, if not `why`; each passes it on.
  void fail(const absl::Status& why, uint32_t culprit, const absl::Status& said = {});
  void end_calls(bool at_once = false);
  bool ending() const { return ending_; }
  void on_executor_error(const absl::Status& error);
  void on_down(uint32_t rank, const absl::Status& why);
  void on_control_message(uint32_t from, ControlMessage kind, std::string_view body);

  // Checks that peers called the same as we did under the same number.
  void compare_calls();
  void compare_last_call();
  // Looks for ranks that have left and calls that are late, once a millisecond at most.
  void look(Time now);
  Time next_look() const { return next_look_; }

 private:
  const absl::Status& begin_call_masking();
  void compare_calls(uint64_t first, uint64_t last);
  // A rank's progress, reported when calls take too long.
  struct Standing {
    executor::CallDescriptor call;  // the one that stands still; sequence 0: none
    uint64_t entered = 0;           // sequence of the last call
    uint32_t waits_for = UINT32_MAX;
  };
  struct Known {  // of another rank
    // What it announced, by sequence % kCalls; sequence 0: nothing. Empty: nothing ever.
    std::vector<executor::CallDescriptor> announced;
    Standing standing;
    bool answered = false;  // `standing` is of this diagnosis
    bool fresh = false;     // and an answer to the last question
    bool asked = false;     // where it stands
  };

  void on_abort(uint32_t from, std::string_view body);
  void on_call(uint32_t from, const executor::CallDescriptor& theirs);
  void check_deadlines(Time now);
  bool settled();
  void diagnose(const executor::Blocked& blocked, const executor::Call& late, Time now);
  Standing standing() const;
  executor::CallDescriptor whole_of(const executor::CallDescriptor& part) const;
  executor::CallDescriptor collective_of(const executor::Call& call) const;
  executor::Blocked blocked() const;
  std::string where(const executor::Blocked& blocked) const;

  const std::string group_;
  const bool masks_lost_;
  Mesh& mesh_;
  executor::FlightRecorder& recorder_;
  executor::Executor* executor_ = nullptr;
  CallTable* calls_ = nullptr;
  absl::Status broken_;
  std::atomic<bool> is_broken_{false};
  std::vector<bool> lost_;
  std::vector<Known> known_;
  Time diagnosing_{};       // when all were asked last; zero: no call is late
  Time answers_by_{};       // until then answers are awaited
  uint64_t told_call_ = 0;  // the last call that a rank was told of for that it waits
  bool ending_ = false;     // calls have yet to end
  Time end_by_ = kNever;
  Time next_look_{};
};

}  // namespace baton::collectives::internal
