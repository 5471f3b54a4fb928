// Wakes threads that sleep until a worker has something for them.
#include "transport/internal/worker/wakeups.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "transport/base/durations.h"

namespace baton::internal {

Wakeups::Wakeups(const Clock& clock) : clock_(clock) {
  // Room now, so that the hot path does not allocate later.
  asleep_.reserve(64);
}

Wakeups::~Wakeups() {
  for (int fd : {epoll_fd_, outside_fd_, event_fd_.load()}) {
    if (fd >= 0) close(fd);
  }
}

absl::Status Wakeups::start() {
  for (int* set : {&epoll_fd_, &outside_fd_}) {
    *set = epoll_create1(EPOLL_CLOEXEC);
    if (*set < 0) return base::refused("epoll_create1", errno);
  }
  for (const Bell* each : {&bell_, &outside_}) {
    if (!each->status().ok()) return each->status();
  }
  epoll_event event{.events = EPOLLIN, .data = {.fd = outside_.fd()}};
  if (epoll_ctl(outside_fd_, EPOLL_CTL_ADD, outside_.fd(), &event) != 0) {
    return base::refused("epoll_ctl", errno);
  }
  if (absl::Status status = watch(bell_.fd()); !status.ok()) return status;
  // For the waits of one thread, so that none of them needs a descriptor later.
  absl::StatusOr<std::unique_ptr<Bell>> spare = borrow_bell();
  if (!spare.ok()) return spare.status();
  give_back(*std::move(spare));
  return absl::OkStatus();
}

// The two sets are flat: a set within a set within a user's own soon is deeper than the kernel
// allows.
absl::Status Wakeups::watch(int fd) {
  for (const int set : {epoll_fd_, outside_fd_}) {
    epoll_event event{.events = EPOLLIN, .data = {.fd = fd}};
    if (epoll_ctl(set, EPOLL_CTL_ADD, fd, &event) == 0) continue;
    return base::refused("epoll_ctl", errno);
  }
  return absl::OkStatus();
}

void Wakeups::not_armed() {
  if (asleep_.empty()) sleeping_.store(false, std::memory_order_relaxed);
}

void Wakeups::disarm(Bell& own) {
  withdraw(own);
  own.silence();
}

bool Wakeups::withdraw(const Bell& own) { return std::erase(asleep_, &own) > 0; }

void Wakeups::rouse() {
  for (Bell* each : asleep_) each->ring();
  asleep_.clear();
  sleeping_.store(false, std::memory_order_relaxed);
}

// Called after something was made visible to the progress thread, which looks for it after
// about_to_sleep(): one of the two sees the other.
void Wakeups::wake() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (!sleeping() || !sleeping_.exchange(false)) return;
  bell_.ring();
}

void Wakeups::signal() {
  const int fd = event_fd_.load(std::memory_order_relaxed);
  if (fd < 0) return;
  const uint64_t one = 1;
  [[maybe_unused]] ssize_t put = write(fd, &one, sizeof one);
}

void Wakeups::rouse_all() {
  look_again_.store(true);
  wake();
  signal();
  tell_waiters();
}

int Wakeups::make_event_fd() {
  // Readable at once: something may have happened before anybody watched.
  if (event_fd() < 0) event_fd_.store(eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK));
  return event_fd();
}

void Wakeups::tell_waiters() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (waiters_.load() != 0) tell_all_waiters();
}

void Wakeups::tell_all_waiters() {
  std::lock_guard lock(wait_mutex_);
  wait_condition_.notify_all();
}

void Wakeups::sleep(const Bell& own, Time until) {
  std::array<pollfd, 2> fds{{{.fd = epoll_fd_, .events = POLLIN, .revents = 0},
                             {.fd = own.fd(), .events = POLLIN, .revents = 0}}};
  // Without a descriptor for the bell this thread cannot be woken, so it does not sleep for long.
  constexpr Time kDeaf = std::chrono::milliseconds(10);
  const Time most = own.fd() < 0 ? kDeaf : std::chrono::seconds(3600);
  const Time left = until == kNever ? most : std::min(most, until - clock_.now());
  if (left <= Time::zero()) return;
  const timespec timeout = base::to_timespec(left);
  ppoll(fds.data(), fds.size(), &timeout, nullptr);
}

absl::StatusOr<std::unique_ptr<Bell>> Wakeups::borrow_bell() {
  if (spare_bells_.empty()) {
    auto fresh = std::make_unique<Bell>();
    if (!fresh->status().ok()) return fresh->status();
    return fresh;
  }
  std::unique_ptr<Bell> spare = std::move(spare_bells_.back());
  spare_bells_.pop_back();
  return spare;
}

}  // namespace baton::internal
