// The driver: advances calls, and waits for them: polling, sleeping, or for the endpoint's thread.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <optional>

#include "absl/status/status.h"
#include "collectives/executor/executor.h"
#include "collectives/internal/call_table.h"
#include "collectives/internal/failure_detector.h"
#include "collectives/internal/mesh.h"
#include "collectives/internal/windows.h"

namespace baton::collectives::internal {

class Driver {
 public:
  // All outlive the driver. `mutex` is the communicator's lock.
  struct Needs : Windows::Needs {
    std::mutex& mutex;
    executor::Executor& executor;
    Windows& windows;
  };
  // `group`: what this drives, as the endpoint knows it.
  Driver(const Needs& needs, const EndpointImpl::Group* group) : needs_(needs), group_(group) {}
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  // True if another thread advances calls. A callback on that thread must advance them itself while
  // it waits.
  bool background() const {
    const EndpointImpl& endpoint = needs_.mesh.endpoint();
    return endpoint.background() && !endpoint.on_background_thread();
  }

  // --- under the lock ---
  bool advance();         // false: nothing happened
  bool tick();            // the worker's part of it: messages, peers, deadlines
  void tick_sometimes();  // for callers that poll: not more often than deadlines need
  // How the call ended, if it is over within some microseconds. Nothing with a background thread.
  std::optional<absl::Status> run_short(Work work);
  // A call has been started: advances it, or has the background thread do so.
  void call_started();

  // --- without the lock ---
  // Blocks until the call has ended and its callback, if any, has returned; DeadlineExceeded: not
  // within `timeout`.
  absl::Status wait(Work work, Time timeout = kNever);
  // The same by this thread alone, which runs no callback meanwhile: one may wait for what this
  // thread holds up.
  absl::Status wait_without_callbacks(Work work) { return drive(work, kNever, false); }
  // Advances everything of the endpoint and sleeps a while, until `over()`, which is asked under
  // the lock; false: not within `timeout`.
  bool wait_until(const std::function<bool()>& over, Time timeout);
  uint64_t sleeps() const { return sleeps_.load(std::memory_order_relaxed); }

 private:
  void doze(Time longest);  // naps, and peers know that they must wake us
  absl::Status wait_for_background(Work work, Time deadline);
  absl::Status drive(Work work, Time timeout, bool callbacks);

  const Needs needs_;
  const EndpointImpl::Group* const group_;
  uint32_t turns_ = 0;
  std::atomic<uint64_t> sleeps_{0};
};

}  // namespace baton::collectives::internal
