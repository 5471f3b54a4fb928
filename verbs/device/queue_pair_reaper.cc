// Destroys queue pairs that the adapter has let go of, on a thread of its own.
#include "verbs/device/queue_pair_reaper.h"

#include <utility>

namespace baton::verbs {

QueuePairReaper::~QueuePairReaper() {
  if (!thread_.joinable()) return;
  {
    std::lock_guard lock(mutex_);
    ending_ = true;
  }
  more_.notify_one();
  thread_.join();
}

void QueuePairReaper::reap(std::function<void()> destroy) {
  {
    std::lock_guard lock(mutex_);
    waiting_.push_back(std::move(destroy));
  }
  if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
  more_.notify_one();
}

void QueuePairReaper::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    more_.wait(lock, [this] { return ending_ || !waiting_.empty(); });
    if (waiting_.empty()) return;
    const std::function<void()> destroy = std::move(waiting_.front());
    waiting_.pop_front();
    lock.unlock();
    destroy();
    lock.lock();
  }
}

}  // namespace baton::verbs
