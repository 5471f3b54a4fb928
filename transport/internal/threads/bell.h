// Bell: a descriptor that wakes whoever polls it. Rung by any thread, silenced by one at a time.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>

#include "transport/base/limits/refusals.h"
#include "transport/base/unique_fd.h"

namespace baton::internal {

class Bell {
 public:
  // fd() < 0 afterwards: there is none, for the reason in status().
  Bell()
      : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        status_(fd_.valid() ? absl::OkStatus() : base::refused("eventfd", errno)) {}

  int fd() const { return fd_.get(); }
  const absl::Status& status() const { return status_; }

  // Noted after it was rung: a silence() in between sees the next round, or nothing. The other way
  // round it would take back the note of a ring that is yet to come, and no thread would ever
  // silence that one.
  void ring() {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t put = write(fd(), &one, sizeof one);
    rung_.store(true);
  }
  void silence() {
    if (!rung_.load(std::memory_order_relaxed) || !rung_.exchange(false)) return;
    uint64_t ignored = 0;
    [[maybe_unused]] const ssize_t got = read(fd(), &ignored, sizeof ignored);
  }

 private:
  const base::UniqueFd fd_;
  const absl::Status status_;
  std::atomic<bool> rung_{false};
};

}  // namespace baton::internal
