// A thread that works tasks off in order: what is too long for the thread of the sockets.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

namespace baton::engine::http {

// Thread-safe.
class TaskThread {
 public:
  explicit TaskThread(size_t capacity) : capacity_(capacity), thread_([this] { loop(); }) {}
  ~TaskThread() { stop(); }
  TaskThread(const TaskThread&) = delete;
  TaskThread& operator=(const TaskThread&) = delete;

  // False, and the task is not taken, when `capacity` wait already or after stop().
  bool post(std::function<void()> task) {
    {
      const std::lock_guard lock(mutex_);
      if (stopping_ || tasks_.size() >= capacity_) return false;
      tasks_.push_back(std::move(task));
    }
    wake_.notify_one();
    return true;
  }

  // Drops what waits and joins. Not to be called by a task.
  void stop() {
    std::deque<std::function<void()>> dropped;
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      dropped.swap(tasks_);
    }
    wake_.notify_one();
    if (thread_.joinable()) thread_.join();
  }

 private:
  void loop() {
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
      if (stopping_) return;
      std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      task = nullptr;
      lock.lock();
    }
  }

  const size_t capacity_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace baton::engine::http
