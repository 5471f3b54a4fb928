// Follows a trainer's collective calls: when launched, when ended, and the time waited.
#include "engine/train/data_parallel/call_tracker.h"

#include <algorithm>
#include <utility>

namespace baton::engine::train {

CallTracker::CallTracker(Communicator& comm, Timeline* timeline)
    : comm_(comm), timeline_(timeline) {
  if (timeline_ != nullptr) watcher_ = std::thread([this] { watch(); });
}

CallTracker::~CallTracker() {
  (void)wait_all();
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (watcher_.joinable()) watcher_.join();
}

CallTracker::Id CallTracker::add(absl::StatusOr<Work> work, Time begin, std::string name,
                                 size_t bytes) {
  std::lock_guard lock(mutex_);
  if (!work.ok()) {
    if (status_.ok()) status_ = work.status();
    return 0;
  }
  calls_.push_back({*work, std::move(name), bytes, begin});
  changed_.notify_all();
  return first_ + calls_.size() - 1;
}

void CallTracker::ended(Call& call, const absl::Status& status) {
  call.ended = true;
  if (!status.ok() && status_.ok()) status_ = status;
  if (timeline_ != nullptr) {
    timeline_->add({kCommunicationTrack, call.name, call.begin, Clock::steady().now(),
                    call.work.sequence, call.bytes});
  }
}

// In the order of the calls: a span may end late if an earlier one still runs, but the time in
// which any runs is exact.
void CallTracker::watch() {
  std::unique_lock lock(mutex_);
  for (Id next = 1;; ++next) {
    changed_.wait(lock, [&] { return stop_ || next < first_ + calls_.size(); });
    if (stop_) return;
    Call& call = calls_[next - first_];  // stays until it has ended
    const Work work = call.work;
    lock.unlock();
    const absl::Status status = comm_.wait(work);
    lock.lock();
    ended(call, status);
    changed_.notify_all();
  }
}

absl::Status CallTracker::wait(Id id) {
  std::unique_lock lock(mutex_);
  if (id < first_ || id - first_ >= calls_.size()) return status_;
  Call& call = calls_[id - first_];
  if (!call.ended) {
    const Time begin = Clock::steady().now();
    if (watcher_.joinable()) {
      changed_.wait(lock, [&] { return call.ended; });
    } else {
      ended(call, comm_.wait(call.work));
    }
    const Time end = Clock::steady().now();
    blocked_ += end - begin;
    if (timeline_ != nullptr) {
      timeline_->add({kWaitTrack, call.name, begin, end, call.work.sequence, 0});
    }
  }
  while (!calls_.empty() && calls_.front().ended) {
    calls_.pop_front();
    ++first_;
  }
  return status_;
}

absl::Status CallTracker::wait_all() {
  for (;;) {
    Id next;
    {
      std::lock_guard lock(mutex_);
      if (calls_.empty()) return status_;
      next = first_;
    }
    (void)wait(next);
  }
}

absl::Status CallTracker::status() const {
  std::lock_guard lock(mutex_);
  return status_;
}

}  // namespace baton::engine::train
