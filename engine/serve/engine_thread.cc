// The engine's loop: commands, a step, sleep when there is nothing to do.
#include "engine/serve/engine_thread.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <utility>

namespace baton::engine::serve {
namespace {

void refuse(uint64_t id, const std::function<void(const OutputEvent&)>& on_event,
            const absl::Status& why) {
  if (!on_event) return;
  RequestMetrics metrics;
  on_event({.id = id,
            .finished = true,
            .reason = FinishReason::kError,
            .status = why,
            .metrics = &metrics});
}

absl::Status stopped() { return stopped_status("this server is shutting down: ask another one"); }

}  // namespace

EngineThread::EngineThread(Engine& engine, AdmissionOptions admission)
    : engine_(engine),
      max_context_(engine.max_context()),
      admission_(admission),
      ended_(!wake_.status().ok()) {
  if (!ended_) thread_ = std::thread([this] { loop(); });
}

EngineThread::~EngineThread() { stop(); }

void EngineThread::stop() {
  if (!thread_.joinable()) return;
  stop_ = true;
  wake_.ring();
  thread_.join();
}

uint64_t EngineThread::submit(Request request) {
  const uint64_t id = next_id_++;
  request.id = id;
  {
    std::unique_lock lock(mutex_);
    if (ended_) {
      lock.unlock();
      refuse(id, request.on_event, stopped());
      return id;
    }
    ++queued_;
    commands_.push_back({.request = std::move(request)});
  }
  engine_.liveness().asked();
  wake_.ring();
  return id;
}

void EngineThread::abort(uint64_t id) {
  {
    const std::lock_guard lock(mutex_);
    if (ended_) return;
    commands_.push_back({.is_abort = true, .request = {.id = id}});
  }
  wake_.ring();
}

absl::Status EngineThread::admit(bool stream, size_t choices) {
  const Time now = Clock::steady().now();
  const std::lock_guard lock(mutex_);
  Backlog backlog = backlog_;
  backlog.arriving += queued_;
  return admission_.admit(backlog, stream, choices, now);
}

void EngineThread::note_end(bool stream, bool answered, const RequestMetrics& metrics) {
  const Time now = Clock::steady().now();
  const std::lock_guard lock(mutex_);
  if (answered) {
    admission_.answered(stream);
  } else {
    admission_.left(stream, metrics.finish - metrics.arrival, backlog_.waiting, now);
  }
}

bool EngineThread::idle() const {
  const std::lock_guard lock(mutex_);
  return ended_ || (commands_.empty() && !busy_);
}

uint64_t EngineThread::refused() const {
  const std::lock_guard lock(mutex_);
  return admission_.refused();
}

EngineStats EngineThread::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

bool EngineThread::take_commands() {
  std::vector<Command> commands;
  {
    const std::lock_guard lock(mutex_);
    commands.swap(commands_);
    busy_ |= !commands.empty();
    backlog_.arriving += std::exchange(queued_, 0);  // until they are counted again
  }
  stepping_ = false;
  for (Command& command : commands) {
    if (command.is_abort) {
      engine_.abort(command.request.id);
      continue;
    }
    const uint64_t id = command.request.id;
    const auto on_event = command.request.on_event;
    count_before_telling(&command.request);
    const absl::Status status = engine_.add_request(std::move(command.request));
    if (!status.ok()) refuse(id, on_event, status);
  }
  stepping_ = true;
  return !commands.empty();
}

// Whoever has the end of an answer finds it in stats(), and its place free, though the step is
// still under way.
void EngineThread::count_before_telling(Request* request) {
  if (!request->on_event) return;
  request->on_event = [this, tell = std::move(request->on_event)](const OutputEvent& event) {
    if (event.finished) {
      const std::lock_guard lock(mutex_);
      stats_ = engine_.stats();
      // Before a step has seen them, the engine knows only some of those that arrive.
      if (stepping_) backlog_ = engine_.backlog();
    }
    tell(event);
  };
}

void EngineThread::take_notes(bool stepped, Time busy) {
  const std::lock_guard lock(mutex_);
  stats_ = engine_.stats();
  backlog_ = engine_.backlog();
  const uint64_t begun = stats_.requests_begun - std::exchange(begun_, stats_.requests_begun);
  if (stepped) admission_.computed(backlog_.unbegun + begun, begun, busy);
  busy_ = engine_.owes_others();
}

void EngineThread::loop() {
  using namespace std::chrono_literals;
  while (!stop_) {
    const bool commanded = take_commands();
    const Time begin = Clock::steady().now();
    engine_.liveness().begin_step();
    const bool stepped = engine_.step(wake_.fd());
    engine_.liveness().end_step(stepped, engine_.owes_step());
    take_notes(stepped, Clock::steady().now() - begin);
    if (commanded || stepped) continue;
    engine_.wait(engine_.has_work() ? 10ms : 1s, wake_.fd());
    wake_.silence();
  }
  engine_.liveness().stop();
  take_commands();
  engine_.abort_all(stopped());
  refuse_commands();
}

// What came since the last look; from here on submit() refuses by itself.
void EngineThread::refuse_commands() {
  std::vector<Command> commands;
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
    commands.swap(commands_);
  }
  for (const Command& command : commands) {
    if (!command.is_abort) refuse(command.request.id, command.request.on_event, stopped());
  }
}

}  // namespace baton::engine::serve
