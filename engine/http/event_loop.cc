// The loop over Boost.Asio's io_context.
#include "engine/http/event_loop.h"

#include <utility>

#include <boost/asio/dispatch.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>

namespace baton::engine::http {
namespace {

namespace asio = boost::asio;

class AsioTimer : public EventLoop::Timer {
 public:
  AsioTimer(asio::io_context& context, std::chrono::milliseconds delay, std::function<void()> task)
      : alive_(std::make_shared<bool>(true)), timer_(context, delay) {
    timer_.async_wait([alive = std::weak_ptr<bool>(alive_),
                       task = std::move(task)](boost::system::error_code error) {
      // A timer may have expired just before it was dropped.
      if (!error && !alive.expired()) task();
    });
  }

 private:
  const std::shared_ptr<bool> alive_;
  asio::steady_timer timer_;
};

}  // namespace

EventLoop::EventLoop() : context_(std::make_unique<asio::io_context>(1)) {}

EventLoop::~EventLoop() { stop(); }

void EventLoop::start() {
  thread_ = std::thread([this] {
    const auto work = asio::make_work_guard(*context_);
    context_->run();
  });
}

void EventLoop::stop() {
  context_->stop();
  if (thread_.joinable()) thread_.join();
}

void EventLoop::post(std::function<void()> task) { asio::post(*context_, std::move(task)); }

void EventLoop::dispatch(std::function<void()> task) { asio::dispatch(*context_, std::move(task)); }

std::unique_ptr<EventLoop::Timer> EventLoop::after(std::chrono::milliseconds delay,
                                                   std::function<void()> task) {
  return std::make_unique<AsioTimer>(*context_, delay, std::move(task));
}

}  // namespace baton::engine::http
