// One thread that serves sockets and timers: connections cost memory, not threads.
//
//   auto loop = std::make_shared<EventLoop>();
//   loop->start();
//   loop->post([] { ... });                          // runs on the loop's thread
//   auto timer = loop->after(5s, [] { ... });        // unless `timer` is dropped before
//   loop->stop();
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

namespace boost::asio {

class io_context;
}  // namespace boost::asio

namespace baton::engine::http {

// Thread-safe. What runs on the loop's thread must not block.
class EventLoop {
 public:
  EventLoop();
  // stop().
  ~EventLoop();
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  void start();
  // Joins the thread; not to be called on it. What was posted and has not run is dropped.
  void stop();

  // Runs `task` on the loop's thread, soon. After stop(): never.
  void post(std::function<void()> task);
  // The same, but at once where the caller is the loop's thread.
  void dispatch(std::function<void()> task);

  // Cancels its task when it is dropped, on the loop's thread.
  class Timer {
   public:
    virtual ~Timer() = default;
  };
  // Runs `task` on the loop's thread after `delay`. To be called on that thread.
  std::unique_ptr<Timer> after(std::chrono::milliseconds delay, std::function<void()> task);

  // For the sockets of this folder.
  boost::asio::io_context& context() { return *context_; }

 private:
  const std::unique_ptr<boost::asio::io_context> context_;
  std::thread thread_;
};

// A thread that works tasks off in order: what is too long for the thread of the sockets.
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
