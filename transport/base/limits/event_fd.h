// EventFd: an eventfd. Any thread rings it; the thread that polls it clears it.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

#include "absl/status/status.h"
#include "transport/base/limits/refusals.h"
#include "transport/base/unique_fd.h"

namespace baton::base {

class EventFd {
 public:
  // fd() < 0 afterwards: the kernel refused it, for the reason in status(). Look at that before a
  // thread sleeps on it.
  EventFd()
      : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        status_(fd_.valid() ? absl::OkStatus() : refused("eventfd", errno)) {}

  int fd() const { return fd_.get(); }
  const absl::Status& status() const { return status_; }

  // A full counter (EAGAIN) wakes just as well.
  void ring() const {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t put = write(fd(), &one, sizeof one);
  }
  void silence() const { silence(fd()); }
  // The same for one that another object owns. True: it was rung.
  static bool silence(int fd) {
    uint64_t ignored = 0;
    return read(fd, &ignored, sizeof ignored) > 0;
  }

 private:
  const UniqueFd fd_;
  const absl::Status status_;
};

}  // namespace baton::base
