// The inside of a communicator: its parts, wired together.
//
//   Mesh             who is in the group, and how each rank is reached
//   Tuner            how a call of a shape is run
//   CallStarter      from arguments to a call
//   CallTable        calls from their start to their end; Executor runs them
//   DeviceCalls      copies of what calls have on devices
//   FailureDetector  what goes wrong, and who is told
//   Driver           advances all of these, and waits
//   Survivors        going on after a failure
#pragma once

#include <memory>
#include <mutex>
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

namespace baton {

class Communicator::Impl final : private collectives::internal::Mesh::Listener {
 public:
  using Lock = std::unique_lock<std::mutex>;

  explicit Impl(CommunicatorOptions communicator_options);
  ~Impl() override;
  absl::Status start();

  // --- each takes the lock ---
  absl::StatusOr<CommBuffer> allocate(size_t bytes);
  void free(const CommBuffer& buffer);
  std::optional<absl::Status> test(Work work);
  bool progress();
  void abort(const absl::Status& why);
  absl::StatusOr<std::unique_ptr<Communicator>> shrink();
  std::string explain(Collective collective, size_t bytes, const CallOptions& call_options) const;
  std::string routes() const;
  CommunicatorStats stats() const;
  absl::Status status() const override;
  std::vector<int> lost_ranks() const;

  CommunicatorOptions options;
  mutable std::mutex mutex;  // guards all of the following
  collectives::internal::Mesh mesh;
  collectives::executor::FlightRecorder recorder;
  collectives::internal::FailureDetector failure;
  collectives::internal::Survivors survivors;
  // From start() on.
  std::unique_ptr<collectives::executor::Executor> executor;
  std::unique_ptr<collectives::internal::Tuner> tuner;
  std::unique_ptr<collectives::internal::DeviceCalls> devices;
  std::unique_ptr<collectives::internal::CallTable> calls;
  std::unique_ptr<collectives::internal::Driver> driver;
  std::unique_ptr<collectives::internal::CallStarter> starter;

 private:
  void on_control_message(uint32_t from, collectives::internal::ControlMessage kind,
                          std::string_view body) override;
  void on_down(uint32_t rank, const absl::Status& why) override;

  absl::Status calibrate();

  std::vector<Block> buffers_;  // of the caller; data null: free
};

}  // namespace baton
