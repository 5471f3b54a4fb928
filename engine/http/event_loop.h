// One thread that serves sockets and timers: connections cost memory, not threads.
//
//   auto loop = std::make_shared<EventLoop>();
//   loop->start();
//   loop->post([] { ... });                          // runs on the loop's thread
//   auto timer = loop->after(5s, [] { ... });        // unless `timer` is dropped before
//   loop->stop();
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <thread>

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

}  // namespace baton::engine::http
