// The driver: advances calls, and waits for them: polling, sleeping, the background thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>

#include "absl/status/status.h"
#include "collectives/executor/executor.h"
#include "collectives/internal/call_table.h"
#include "collectives/internal/failure_detector.h"
#include "collectives/internal/mesh.h"

namespace baton::collectives::internal {

class Driver {
 public:
  // All outlive the driver. `mutex` is the communicator's lock.
  struct Needs {
    std::mutex& mutex;
    Mesh& mesh;
    executor::Executor& executor;
    CallTable& calls;
    FailureDetector& failure;
  };
  explicit Driver(const Needs& needs) : needs_(needs) {}
  ~Driver();  // ends the background thread
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  // From here on a thread of ours advances calls.
  void start_background();
  bool background() const { return background_.joinable(); }

  // --- under the lock ---
  bool advance();         // false: nothing happened
  bool tick();            // the worker's part of it: messages, peers, deadlines
  void tick_sometimes();  // for callers that poll: not more often than deadlines need
  // How the call ended, if it is over within some microseconds. Nothing with a background thread.
  std::optional<absl::Status> run_short(Work work);
  // A call has been started: advances it, or has the background thread do so.
  void call_started();

  // --- without the lock ---
  // Blocks until the call has ended.
  absl::Status wait(Work work);
  uint64_t sleeps() const { return sleeps_.load(std::memory_order_relaxed); }

 private:
  void doze(Time longest);  // naps, and peers know that they must wake us
  void run_background();

  const Needs needs_;
  uint32_t turns_ = 0;
  std::thread background_;
  std::atomic<bool> stop_{false};
  std::condition_variable background_wakes_;
  std::atomic<uint64_t> sleeps_{0};
};

}  // namespace baton::collectives::internal
