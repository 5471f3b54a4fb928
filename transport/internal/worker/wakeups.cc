// Wakes threads that sleep until a worker has something for them.
#include "transport/internal/worker/wakeups.h"

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "transport/base/durations.h"
#include "transport/internal/worker/core.h"
#include "transport/progress_thread.h"

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

namespace baton {

// Runs progress(): polls while there is work, sleeps when there is none.

namespace {

// How long the worker may stay undriven after a polling caller has stopped: at first, and after it
// has polled for a while. Looking more often interrupts the caller, where the two share a core.
constexpr Time kStandBack = std::chrono::microseconds(100);
constexpr Time kStandBackLong = std::chrono::milliseconds(1);

void stand_back(internal::Bell& bell, Time time) {
  pollfd called{.fd = bell.fd(), .events = POLLIN, .revents = 0};
  const timespec span = base::to_timespec(time);
  if (ppoll(&called, 1, &span, nullptr) > 0) bell.silence();
}

}  // namespace

ProgressThread::ProgressThread(Worker& worker, Options options)
    : worker_(worker), options_(options) {
  worker_.impl_->threaded.store(true);
  try {
    thread_ = std::thread([this] { run(); });
  } catch (...) {
    worker_.impl_->threaded.store(false);
    throw;
  }
}

ProgressThread::~ProgressThread() {
  if (worker_.impl_->of_parent()) {
    thread_.detach();  // a forked child has no such thread to wait for
    return;
  }
  stop_.store(true);
  {
    // Not wake(): the thread may be armed by another's progress(), which looks for work only.
    std::lock_guard lock(worker_.impl_->mutex);
    worker_.impl_->wakeups.rouse();
  }
  thread_.join();
  worker_.impl_->threaded.store(false);
  worker_.impl_->wakeups.tell_all_waiters();
}

void ProgressThread::run() {
  if (options_.cpu >= 0) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(static_cast<size_t>(options_.cpu), &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
  }
  Worker::Impl& impl = *worker_.impl_;
  internal::Bell mine;
  {
    std::lock_guard lock(impl.mutex);
    impl.thread_bell = &mine;
  }
  Time busy = impl.clock.now();
  Time patience = kStandBack;
  while (!stop_.load()) {
    if (impl.helped_lately()) {
      stand_back(mine, patience);
      patience = std::min(2 * patience, kStandBackLong);
      busy = impl.clock.now();
      continue;
    }
    patience = kStandBack;
    const bool any = worker_.progress();
    impl.mutex.give_way();
    if (any) {
      busy = impl.clock.now();
      continue;
    }
    if (impl.clock.now() - busy < options_.spin) continue;
    bool armed = false;
    Time timer = kNever;
    {
      std::lock_guard lock(impl.mutex);
      armed = !stop_.load() && impl.arm(mine);
      if (armed) timer = impl.next_timer();
    }
    // A peer on this machine may have moved a counter without an event of ours.
    impl.wakeups.tell_waiters();
    if (!armed) continue;
    impl.wakeups.sleep(mine, timer);
    {
      std::lock_guard lock(impl.mutex);
      impl.wakeups.disarm(mine);
    }
    impl.wakeups.tell_waiters();
    busy = impl.clock.now();
  }
  std::lock_guard lock(impl.mutex);
  impl.thread_bell = nullptr;
}

}  // namespace baton
