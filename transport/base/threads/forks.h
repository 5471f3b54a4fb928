// Makes fork() safe: a fork waits for work that must not be interrupted, and a child can tell that
// it is one.
//
// Locks that another thread has at a fork stay taken in the child for ever: ours, and those of the
// libraries below. So a fork waits, for a second at most (times BATON_PATIENCE), and in this order:
// until no thread makes or ends anything (ForkWaits::kMaking), for the locks of all workers, under
// which they move bytes and meet peers, and until no thread does anything that is over in a moment
// (kMoment). Whoever has one of these may take those that come later, and wait for who has them.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

namespace baton::base {

namespace fork_internal {
inline std::atomic<uint32_t> count{0};
}  // namespace fork_internal

// Counts in a child what forks lie between it and the process that loaded the library.
inline uint32_t forks() { return fork_internal::count.load(std::memory_order_relaxed); }

// Whether an object is a forked child's copy of its parent's, whose threads are missing here and
// whose sockets and shared memory the parent uses.
class MadeHere {
 public:
  MadeHere() : forks_(forks()) {}
  bool elsewhere() const { return forks_ != forks(); }

 private:
  uint32_t forks_;
};

// While a thread has one a fork waits, and while a fork waits other threads wait for it.
class ForkWaits {
 public:
  enum Kind : uint8_t { kMaking, kMoment };
  explicit ForkWaits(Kind kind);
  ~ForkWaits();
  ForkWaits(const ForkWaits&) = delete;
  ForkWaits& operator=(const ForkWaits&) = delete;

 private:
  const Kind kind_;
};

// A worker's lock: a fork takes it. `waiting`: how many wait for it, so that who has it all the
// time gives way.
class TakenByForks {
 public:
  TakenByForks(std::mutex& mutex, std::atomic<int>& waiting);
  ~TakenByForks();
  TakenByForks(const TakenByForks&) = delete;
  TakenByForks& operator=(const TakenByForks&) = delete;

 private:
  friend struct Forks;
  std::mutex& mutex_;
  std::atomic<int>& waiting_;
  bool taken_ = false;
};

}  // namespace baton::base
