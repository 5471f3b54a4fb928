// A thread that makes peers' rings ready for copies, and lets go of them: the driver's calls for
// that block, and may not where progress is made.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

namespace baton::internal {

class Pinner {
 public:
  // Keeps memory pinned as long as it lives.
  using Pin = std::shared_ptr<void>;
  struct Done {
    uint64_t job = 0;
    absl::StatusOr<Pin> pin;
  };

  // `told` is called on the thread after each job that pins.
  explicit Pinner(std::function<void()> told) : told_(std::move(told)) {}
  ~Pinner();  // after all that was asked for

  // Where no thread can be had both are done here.
  void pin(uint64_t job, std::function<absl::StatusOr<Pin>()> work);
  // And then of the mapping that was pinned.
  void let_go(Pin pin, std::shared_ptr<const void> mapping);
  // The jobs that ended since the last call.
  std::vector<Done> take();

 private:
  bool start();
  void run();
  void ask(std::function<void()> work);

  const std::function<void()> told_;
  std::mutex mutex_;
  std::condition_variable condition_;
  std::deque<std::function<void()>> work_;
  std::vector<Done> done_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace baton::internal
