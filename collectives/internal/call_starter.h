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
  struct Needs {
    const CommunicatorOptions& options;
    std::mutex& mutex;
    Mesh& mesh;
    Tuner& tuner;
    CallTable& calls;
    FailureDetector& failure;
    Driver& driver;
    DeviceCalls& devices;
  };
  explicit CallStarter(const Needs& needs) : needs_(needs) {}

  // Without the lock. May block while the ranks vote.
  absl::StatusOr<Work> begin(const Request& request);
  absl::Status run(const Request& request);  // begins it and waits
  absl::StatusOr<Work> begin_point_to_point(bool sends, void* data, size_t count, DataType type,
                                            int other, const CallOptions& options);
  absl::StatusOr<Work> begin_all_to_all_v(const void* in, const Blocks& send, void* out,
                                          const Blocks& receive, DataType type,
                                          const CallOptions& options);

  proof::CallShape shape_of(const Request& request) const;

 private:
  using Lock = std::unique_lock<std::mutex>;

  absl::StatusOr<Work> begin(const Request& request, Lock& lock);
  absl::StatusOr<Work> start(const Request& request, Tuner::Entry& entry, bool in_place,
                             DeviceCalls::StagedPtr staged = nullptr, bool on_device = false);
  // What a call has on devices, as memory of the host's with the input in it.
  absl::StatusOr<DeviceCalls::StagedPtr> fetch(absl::StatusOr<DeviceCalls::StagedPtr> staged,
                                               Collective what, const CallOptions& options);
  absl::Status end_with(Collective what, const absl::Status& why);
  absl::Status prepare_vote(Tuner::Entry& entry);
  absl::Status await_vote(Tuner::Entry& entry, Lock& lock);

  const Needs needs_;
  bool voting_ = false;  // a call waits for a vote, and others wait behind it
  std::condition_variable voted_;
};

}  // namespace baton::collectives::internal
