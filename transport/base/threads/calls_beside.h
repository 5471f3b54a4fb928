// Calls that may take long, such as looking up a name, on threads of this object's: no other call
// waits for them.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <set>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "transport/base/threads/forks.h"

namespace baton::base {

// All calls come from one thread.
template <typename Key, typename Result>
class CallsBeside {
 public:
  // At a time: one that is slow keeps few others waiting.
  static constexpr size_t kMostThreads = 8;
  using Ended = std::vector<std::pair<Key, Result>>;

  // `ended` is called after each, by its thread.
  explicit CallsBeside(std::function<void()> ended = [] {}) : told_(std::move(ended)) {}
  ~CallsBeside() { close(); }
  CallsBeside(const CallsBeside&) = delete;
  CallsBeside& operator=(const CallsBeside&) = delete;

  // True for calls that run, wait for a thread, or have ended and were not taken yet.
  bool contains(const Key& key) const { return open_.contains(key); }
  size_t size() const { return open_.size(); }

  // Begins the call for a key that has none running. False: no thread could be started.
  bool begin(const Key& key, std::function<Result()> call) {
    const std::lock_guard lock(mutex_);
    if (idle_ <= queue_.size() && threads_.size() < kMostThreads) {
      try {
        threads_.emplace_back([this] { run(); });
      } catch (const std::system_error&) {
        if (threads_.empty()) return false;  // else one that is there does it later
      }
    }
    queue_.emplace_back(key, std::move(call));
    open_.insert(key);
    wanted_.notify_one();
    return true;
  }

  // The calls that ended since the last call.
  Ended take_ended() {
    Ended ended;
    if (open_.empty()) return ended;
    {
      const std::lock_guard lock(mutex_);
      ended.swap(ended_);
    }
    for (const auto& [key, result] : ended) open_.erase(key);
    return ended;
  }

  // Waits for those that have begun; others do not begin.
  void close() {
    if (made_here_.elsewhere()) {
      for (std::thread& thread : threads_) thread.detach();  // the parent's, and not here
      threads_.clear();
      return;
    }
    {
      const std::lock_guard lock(mutex_);
      closed_ = true;
    }
    wanted_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      ++idle_;
      wanted_.wait(lock, [this] { return closed_ || !queue_.empty(); });
      --idle_;
      if (closed_) return;
      auto [key, call] = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      Result result = call();
      lock.lock();
      ended_.emplace_back(std::move(key), std::move(result));
      told_();
    }
  }

  const MadeHere made_here_;
  const std::function<void()> told_;
  std::set<Key> open_;
  std::mutex mutex_;  // of what follows, but for threads_
  std::condition_variable wanted_;
  std::deque<std::pair<Key, std::function<Result()>>> queue_;
  Ended ended_;
  size_t idle_ = 0;
  bool closed_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace baton::base
