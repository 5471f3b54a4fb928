// How threads sleep until a worker has something for them, and what wakes them: bells, the event
// descriptor, and the condition of those that leave the driving to a ProgressThread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/status/status.h"
#include "transport/base/limits/event_fd.h"
#include "transport/clock.h"

namespace baton::internal {

// Bell: a descriptor that wakes the threads that poll it. Any thread rings it; one at a time clears
// it.
class Bell {
 public:
  int fd() const { return event_.fd(); }
  const absl::Status& status() const { return event_.status(); }  // not OK: there is no descriptor

  // Noted after it was rung: a silence() in between sees the next round, or nothing. The other way
  // round it would take back the note of a ring that is yet to come, and no thread would ever
  // silence that one.
  void ring() {
    event_.ring();
    rung_.store(true);
  }
  void silence() {
    if (rung_.load(std::memory_order_relaxed) && rung_.exchange(false)) event_.silence();
  }

 private:
  const base::EventFd event_;
  std::atomic<bool> rung_{false};
};

// Under the worker's lock, except what is marked lock-free.
class Wakeups {
 public:
  explicit Wakeups(const Clock& clock);
  ~Wakeups();
  absl::Status start();
  // Data on `fd` wakes those that sleep.
  absl::Status watch(int fd);

  // --- of a round of progress ---
  // Whether rouse_all() was called since the last one.
  bool begin_round() {
    sleeping_.store(false, std::memory_order_relaxed);
    bell_.silence();
    return look_again_.load(std::memory_order_relaxed) && look_again_.exchange(false);
  }
  // Call it before looking for work: wake() either sees this or comes before that look.
  void about_to_sleep() { sleeping_.store(true, std::memory_order_seq_cst); }
  bool look_again() const { return look_again_.load(); }
  bool anyone_asleep() const { return !asleep_.empty(); }
  void rouse();  // wakes all that are armed

  // --- of those that sleep: each has a bell of its own, for what one has heard the others must
  // still hear ---
  Bell& outside() { return outside_; }  // of whoever sleeps on wait_fd()
  int wait_fd() const { return outside_fd_; }
  void armed(Bell& own) { asleep_.push_back(&own); }  // another's progress() must rouse it
  void not_armed();
  void disarm(Bell& own);
  bool withdraw(const Bell& own);  // the same, but the bell may ring on; whether it was armed
  void sleep(const Bell& own, Time until);  // lock-free
  // A bell for one wait.
  absl::StatusOr<std::unique_ptr<Bell>> borrow_bell();
  void give_back(std::unique_ptr<Bell> bell) { spare_bells_.push_back(std::move(bell)); }

  // --- lock-free ---
  void wake();    // whoever sleeps, to make a round of progress
  void signal();  // something the application may wait for has happened
  void rouse_all();
  bool sleeping() const { return sleeping_.load(std::memory_order_relaxed); }
  int event_fd() const { return event_fd_.load(); }
  int make_event_fd();  // with the lock
  // Wakes threads that leave progress to a ProgressThread. Call without the lock.
  void tell_waiters();
  void tell_all_waiters();
  // Whether `ready` became true while it slept for so long at most.
  template <typename Ready>
  bool await_told(Time most, const Ready& ready) {
    std::unique_lock lock(wait_mutex_);
    waiters_.fetch_add(1);
    const bool is_ready = ready();
    if (!is_ready) wait_condition_.wait_for(lock, most);
    waiters_.fetch_sub(1);
    return is_ready;
  }

 private:
  const Clock& clock_;
  int epoll_fd_ = -1;    // the providers' descriptors and the bell
  int outside_fd_ = -1;  // the same, and `outside_`: wait_fd()
  std::atomic<bool> look_again_{false};
  Bell bell_;  // rung by wake()
  Bell outside_;
  std::vector<Bell*> asleep_;
  std::vector<std::unique_ptr<Bell>> spare_bells_;
  std::atomic<int> event_fd_{-1};
  std::atomic<bool> sleeping_{false};
  std::atomic<uint32_t> waiters_{0};
  std::mutex wait_mutex_;
  std::condition_variable wait_condition_;
};

}  // namespace baton::internal
