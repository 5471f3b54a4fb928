// The inside of a communicator: its parts, wired together.
//
//   EndpointImpl     what it shares with the other communicators of the process
//   Mesh             who is in the group, and how each rank is reached
//   Tuner            how a call of a shape is run
//   CallStarter      from arguments to a call
//   CallTable        calls from their start to their end; Executor runs them
//   DeviceCalls      copies of what calls have on devices
//   Windows          accesses to windows
//   FailureDetector  what goes wrong, and who is told
//   Driver           advances all of these, and waits
//   Survivors        going on after a failure
#pragma once

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "collectives/communicator.h"
#include "collectives/executor/executor.h"
#include "collectives/executor/flight_recorder.h"
#include "collectives/internal/call_starter.h"
#include "collectives/internal/call_table.h"
#include "collectives/internal/device_calls.h"
#include "collectives/internal/driver.h"
#include "collectives/internal/failure_detector.h"
#include "collectives/internal/mesh.h"
#include "collectives/internal/survivors.h"
#include "collectives/internal/tuner.h"
#include "collectives/internal/windows.h"

namespace baton {

namespace collectives::internal {
// A group's options, as those of a communicator.
CommunicatorOptions options_of(GroupOptions options);
}  // namespace collectives::internal

class Communicator::Impl final : public collectives::internal::Mesh::Listener,
                                 public collectives::internal::EndpointImpl::Group {
 public:
  using Lock = std::unique_lock<std::mutex>;

  // `core` is the inside of `endpoint`.
  Impl(CommunicatorOptions communicator_options, std::shared_ptr<Endpoint> endpoint,
       collectives::internal::EndpointImpl& core);
  ~Impl() override;
  // Ends the calls that are in flight, and leaves the group.
  void leave(bool in_own_callback);
  // Never frees it: the thread that runs its callback still uses it.
  static void keep(std::unique_ptr<Impl> impl);
  // Makes the group. `cost`: what links cost, where that is known. With `eager` the links to some
  // neighbours are made at once, and it is ready when they are there.
  absl::Status start(absl::Span<const Handle> handles, uint64_t uuid, bool eager,
                     const collectives::prediction::CostParameters* cost);
  absl::Status calibrate();

  // --- each takes the lock ---
  absl::StatusOr<std::unique_ptr<Communicator>> shrink();
  absl::StatusOr<std::unique_ptr<Communicator>> split(int color, int key, GroupOptions of_group);
  // split() in two steps: what the ranks tell each other, in place until the work has ended, and
  // then the group of those of this color.
  struct Splitting {
    std::array<int32_t, 2> mine{};  // color, key
    std::vector<std::array<int32_t, 2>> all;
    std::vector<Handle> handles;
    uint64_t uuid = 0;
  };
  absl::StatusOr<Work> begin_split(int color, int key, Splitting& split);
  absl::StatusOr<std::unique_ptr<Communicator>> finish_split(const Splitting& split,
                                                             GroupOptions of_group);
  absl::StatusOr<std::unique_ptr<Communicator>> subgroup(absl::Span<const int> ranks,
                                                         GroupOptions of_group);
  absl::StatusOr<Work> reconfigure(absl::Span<const Handle> handles, uint64_t uuid, Time timeout);
  absl::Status wait_ready(Time timeout);

  CommunicatorOptions options;
  std::shared_ptr<Endpoint> endpoint;  // lives as long as this
  collectives::internal::EndpointImpl& core;
  std::mutex& mutex;  // the endpoint's; guards all of the following
  std::atomic<int> rank{0}, ranks{1};
  collectives::internal::Mesh mesh;
  collectives::executor::FlightRecorder recorder;
  collectives::internal::FailureDetector failure;
  collectives::internal::Survivors survivors;
  // Anew for each group; at the same place, since others refer to them.
  std::optional<collectives::executor::Executor> executor;
  std::optional<collectives::internal::Tuner> tuner;
  std::optional<collectives::internal::DeviceCalls> devices;
  // From start() on.
  std::unique_ptr<collectives::internal::CallTable> calls;
  std::unique_ptr<collectives::internal::Windows> windows;
  std::unique_ptr<collectives::internal::Driver> driver;
  std::unique_ptr<collectives::internal::CallStarter> starter;

  // The request of reconfigure(), held until earlier calls have ended.
  struct Next {
    std::vector<Handle> handles;
    uint64_t uuid = 0;
    uint32_t rank = 0;
    Time timeout{};
    Time settle_by{};  // then the old group ends, whatever is on its way
  };
  std::optional<Next> reconfiguring;

 private:
  using ControlMessage = collectives::internal::ControlMessage;
  using Process = collectives::internal::Process;

  void on_control_message(uint32_t from, ControlMessage kind, std::string_view body) override;
  void on_down(uint32_t rank, const absl::Status& why) override;
  void on_wrong(const absl::Status& why, uint32_t culprit) override;
  void on_link(uint32_t rank, collectives::executor::Link& link) override;
  void cancel_accesses() override { windows->cancel(); }
  bool accesses_free(uint32_t of) const override { return windows->sources_free(of); }
  void withdraw_accesses(uint32_t of) override { windows->withdraw(of); }

  void on_control_message(Process& from, ControlMessage kind, std::string_view body) override {
    mesh.on_control_message(from, kind, body);
  }
  void on_ready(Process& process) override { mesh.on_ready(process); }
  void on_goodbye(Process& process) override { mesh.on_goodbye(process); }
  void on_down(Process& process, const absl::Status& why) override { mesh.on_down(process, why); }
  // Others may access a window at any time.
  bool busy() const override { return !calls->in_flight().empty() || windows->any(); }
  bool advance() override { return driver->advance(); }
  void look(Time now) override;
  bool idle() const override {
    return !busy() && failure.broken().ok() && !mesh.starting() && !mesh.connecting() &&
           !reconfiguring;
  }
  void set_sleeping(uint32_t sleepers) override {
    mesh.control().sleeping.store(sleepers, std::memory_order_seq_cst);
  }

  absl::Status enter(absl::Span<const Handle> handles, uint64_t uuid, uint32_t rank, bool eager,
                     Time start_timeout, const collectives::prediction::CostParameters* cost);
  void end_group();
  void enter_next();
  // Another one of this endpoint, with the costs of this one; `ready`: waits until it is.
  absl::StatusOr<std::unique_ptr<Communicator>> make(absl::Span<const Handle> members,
                                                     uint64_t uuid, CommunicatorOptions own,
                                                     bool ready = false);

  Work entering_;  // of reconfigure(): ends when the group is ready; sequence 0: none
  size_t wanted_slot_bytes_ = 0;  // options.slot_bytes is what fits the group's size
  uint64_t splits_ = 0;
  std::map<std::vector<int>, uint64_t> subgroups_;  // made so far, by their ranks
};

}  // namespace baton
