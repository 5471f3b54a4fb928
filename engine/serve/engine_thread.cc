// The engine's loop: commands, a step, sleep when there is nothing to do.
#include "engine/serve/engine_thread.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <chrono>
#include <utility>

namespace baton::engine::serve {

EngineThread::EngineThread(Engine& engine)
    : engine_(engine),
      max_context_(engine.max_context()),
      wake_fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
      thread_([this] { loop(); }) {}

EngineThread::~EngineThread() {
  stop_ = true;
  wake();
  thread_.join();
  close(wake_fd_);
}

void EngineThread::wake() {
  const uint64_t one = 1;
  // A full counter (EAGAIN) wakes just as well.
  (void)!write(wake_fd_, &one, sizeof(one));
}

uint64_t EngineThread::submit(Request request) {
  const uint64_t id = next_id_++;
  request.id = id;
  {
    const std::lock_guard lock(mutex_);
    commands_.push_back({.request = std::move(request)});
  }
  wake();
  return id;
}

void EngineThread::abort(uint64_t id) {
  {
    const std::lock_guard lock(mutex_);
    commands_.push_back({.is_abort = true, .request = {.id = id}});
  }
  wake();
}

EngineStats EngineThread::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

kvtransfer::KvConnectorStats EngineThread::connector_stats() const {
  const std::lock_guard lock(mutex_);
  return connector_stats_;
}

bool EngineThread::take_commands() {
  std::vector<Command> commands;
  {
    const std::lock_guard lock(mutex_);
    commands.swap(commands_);
  }
  for (Command& command : commands) {
    if (command.is_abort) {
      engine_.abort(command.request.id);
      continue;
    }
    const uint64_t id = command.request.id;
    const auto on_event = command.request.on_event;
    const absl::Status status = engine_.add_request(std::move(command.request));
    if (status.ok() || !on_event) continue;
    RequestMetrics metrics;
    on_event({.id = id,
              .finished = true,
              .reason = FinishReason::kError,
              .status = status,
              .metrics = &metrics});
  }
  return !commands.empty();
}

void EngineThread::loop() {
  using namespace std::chrono_literals;
  Time described{};  // when the connector's statistics, which cost more, were last taken
  while (!stop_) {
    const bool commanded = take_commands();
    const bool stepped = engine_.step();
    {
      const std::lock_guard lock(mutex_);
      stats_ = engine_.stats();
    }
    if (const Time now = Clock::steady().now(); !stepped || now - described > 100ms) {
      kvtransfer::KvConnectorStats connector_stats = engine_.connector_stats();
      const std::lock_guard lock(mutex_);
      connector_stats_ = std::move(connector_stats);
      described = now;
    }
    if (commanded || stepped) continue;
    engine_.wait(engine_.has_work() ? 10ms : 1s, wake_fd_);
    uint64_t count = 0;
    (void)!read(wake_fd_, &count, sizeof(count));
  }
  take_commands();
  engine_.abort_all();
}

}  // namespace baton::engine::serve
