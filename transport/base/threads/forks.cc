// Forks of the process that the library is in.
#include "transport/base/threads/forks.h"

#include <pthread.h>
#include <sched.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <new>
#include <utility>
#include <vector>

namespace baton::base {

int patience_factor();  // transport/base/patience.h, whose folder uses this one

namespace {

using SteadyTime = std::chrono::steady_clock::time_point;

thread_local std::array<int, 2> held{};  // by this thread, of each kind

// Closed while a thread forks.
class Gate {
 public:
  void enter() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return forking_ == 0; });
    ++inside_;
  }
  void leave() {
    const std::lock_guard lock(mutex_);
    --inside_;
    changed_.notify_all();
  }
  // `mine`: of those inside, the thread that forks.
  void close(SteadyTime end, int mine) {
    std::unique_lock lock(mutex_);
    ++forking_;
    changed_.wait_until(lock, end, [&] { return inside_ == mine; });
    lock.release();
  }
  void open() {
    --forking_;
    mutex_.unlock();
    changed_.notify_all();
  }
  // In a child: the other threads that were inside, or waited, are not here.
  void open_alone(int mine) {
    inside_ = mine;
    forking_ = 0;
    new (&changed_) std::condition_variable;
    mutex_.unlock();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int inside_ = 0;
  int forking_ = 0;
};

}  // namespace

// Never destroyed: threads may fork until the program's last moment.
struct Forks {
  static Forks& all() {
    static Forks* const only = new Forks;
    return *only;
  }

  void before() {
    const SteadyTime end = std::chrono::steady_clock::now() + most_wait;
    gates[ForkWaits::kMaking].close(end, mine(ForkWaits::kMaking));
    mutex.lock();
    for (TakenByForks* each : workers) {
      each->waiting_.fetch_add(1, std::memory_order_relaxed);
      while (!(each->taken_ = each->mutex_.try_lock()) && std::chrono::steady_clock::now() < end) {
        sched_yield();
      }
      each->waiting_.fetch_sub(1, std::memory_order_relaxed);
    }
    gates[ForkWaits::kMoment].close(end, mine(ForkWaits::kMoment));
  }
  void after() {
    gates[ForkWaits::kMoment].open();
    open_workers();
    gates[ForkWaits::kMaking].open();
  }
  void in_child() {
    gates[ForkWaits::kMoment].open_alone(mine(ForkWaits::kMoment));
    open_workers();
    workers.clear();  // the parent's
    gates[ForkWaits::kMaking].open_alone(mine(ForkWaits::kMaking));
    fork_internal::count.fetch_add(1, std::memory_order_relaxed);
  }
  void open_workers() {
    for (TakenByForks* each : workers) {
      if (std::exchange(each->taken_, false)) each->mutex_.unlock();
    }
    mutex.unlock();
  }

  static int mine(ForkWaits::Kind kind) { return held[kind] > 0 ? 1 : 0; }

  const std::chrono::seconds most_wait{patience_factor()};
  std::array<Gate, 2> gates;
  std::mutex mutex;  // of the next
  std::vector<TakenByForks*> workers;
};

namespace {

// As the library is loaded, so that no fork can come in between.
[[maybe_unused]] const int kAtLoad =
    (Forks::all(), pthread_atfork([] { Forks::all().before(); }, [] { Forks::all().after(); },
                                  [] { Forks::all().in_child(); }));

}  // namespace

ForkWaits::ForkWaits(Kind kind) : kind_(kind) {
  if (held[kind]++ == 0) Forks::all().gates[kind].enter();
}
ForkWaits::~ForkWaits() {
  if (--held[kind_] == 0) Forks::all().gates[kind_].leave();
}

TakenByForks::TakenByForks(std::mutex& mutex, std::atomic<int>& waiting)
    : mutex_(mutex), waiting_(waiting) {
  Forks& forks = Forks::all();
  const std::lock_guard lock(forks.mutex);
  forks.workers.push_back(this);
}
TakenByForks::~TakenByForks() {
  Forks& forks = Forks::all();
  const std::lock_guard lock(forks.mutex);
  std::erase(forks.workers, this);
}

}  // namespace baton::base
