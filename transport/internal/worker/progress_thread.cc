// Runs progress(): polls while there is work, sleeps when there is none.
#include "transport/progress_thread.h"

#include <poll.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>

#include "transport/base/durations.h"
#include "transport/internal/worker/core.h"

namespace baton {
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
