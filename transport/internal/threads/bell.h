// Bell: a descriptor that wakes whoever polls it. Rung by any thread, silenced by one at a time.
#pragma once

#include <atomic>

#include "transport/base/limits/event_fd.h"

namespace baton::internal {

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

}  // namespace baton::internal
