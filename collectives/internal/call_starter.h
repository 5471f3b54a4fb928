// The call starter: from a caller's arguments to a call in the table.
//
// Refuses what makes no sense and what there is no room for, has the ranks vote on how calls of a
// shape are run when it is time for that, and starts the call. Calls enter in the order in which
// their threads come here.
#pragma once

#include <condition_variable>
#include <mutex>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "collectives/communicator.h"
#include "collectives/internal/arguments.h"
#include "collectives/internal/call_table.h"
#include "collectives/internal/device_calls.h"
#include "collectives/internal/driver.h"
#include "collectives/internal/failure_detector.h"
#include "collectives/internal/mesh.h"
#include "collectives/internal/tuner.h"

namespace baton::collectives::internal {

class CallStarter {
 public:
  // All outlive this. `mutex` is the communicator's lock.
  struct Needs : Windows::Needs {
    std::mutex& mutex;
    Tuner& tuner;
    Driver& driver;
    DeviceCalls& devices;
  };
  explicit CallStarter(const Needs& needs) : needs_(needs) {}

  // Without the lock. May block while the ranks vote, or the input leaves its device; others may
  // abort() meanwhile.
  absl::StatusOr<Work> begin(const Request& request);
  absl::Status run(const Request& request);  // begins it and waits
  absl::StatusOr<Work> begin_point_to_point(bool sends, void* data, size_t count, DataType type,
                                            int other, const CallOptions& options);
  absl::StatusOr<Work> begin_all_to_all_v(const void* in, const Blocks& send, void* out,
                                          const Blocks& receive, DataType type,
                                          const CallOptions& options);

  // --- under the lock ---
  using Lock = std::unique_lock<std::mutex>;
  // Waits for collectives of other threads that are being begun: all ranks have them in one order.
  void await_turn(Lock& lock) {
    turn_over_.wait(lock, [this] { return beginning_ == 0; });
  }
  absl::StatusOr<Work> begin(const Request& request, Lock& lock);
  // How it runs, and starts it so. `entry`: the tuner's; null: to be looked up.
  absl::StatusOr<Work> choose(const Request& request, bool in_place, DeviceCalls::StagedPtr staged,
                              bool on_device, Lock& lock, Tuner::Entry* entry = nullptr);
  // A call is being begun by a thread that has let go of the lock.
  bool beginning() const { return beginning_ > 0; }

  prediction::CallShape shape_of(const Request& request) const;

 private:
  absl::StatusOr<Work> start(const Request& request, Tuner::Entry& entry, bool in_place,
                             DeviceCalls::StagedPtr staged = nullptr, bool on_device = false);
  // The host memory that stands in for a call's device memory, with the input copied into it.
  absl::StatusOr<DeviceCalls::StagedPtr> fetch(absl::StatusOr<DeviceCalls::StagedPtr> staged,
                                               Collective what, const CallOptions& options,
                                               Lock& lock);
  // Without the lock: also what the call's streams take is there.
  absl::Status usable(const CallOptions& options) const;
  absl::Status end_with(Collective what, const absl::Status& why);
  absl::Status prepare_vote(Tuner::Entry& entry);
  absl::Status await_vote(Tuner::Entry& entry, Lock& lock);

  // Two calls for which this is equal differ in their memory and in when and how they end alone.
  struct Kind {
    size_t count = SIZE_MAX;  // no call's
    size_t chunk_bytes = 0;
    uint32_t channels = 0;
    int root = 0;
    Collective collective = Collective::kBarrier;
    DataType type = DataType::kF32;
    ReduceOp op = ReduceOp::kSum;
    std::optional<Algorithm> algorithm;
    std::optional<bool> ordered;
    bool operator==(const Kind&) const = default;
  };
  static Kind kind_of(const Request& request);

  const Needs needs_;
  // The last call whose entry of the tuner was looked up, and which is still its last: the next one
  // is mostly like it, and to check and look up all of that takes a fifth of a small call.
  Kind last_;
  Extents last_extents_;
  int beginning_ = 0;
  std::condition_variable turn_over_;
};

}  // namespace baton::collectives::internal
