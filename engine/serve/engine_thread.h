// An engine with a thread of its own: requests go in from any thread, events come out of it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "engine/serve/engine.h"
#include "engine/serve/requests/request.h"
#include "transport/base/limits/event_fd.h"

namespace baton::engine::serve {

// Idle, the thread sleeps until a request or a peer wakes it.
class EngineThread {
 public:
  // `engine` must outlive this object and must not be used by anyone else meanwhile.
  explicit EngineThread(Engine& engine, AdmissionOptions admission = {});
  // As stop(). Whoever submits or aborts must be done with this object.
  ~EngineThread();
  EngineThread(const EngineThread&) = delete;
  EngineThread& operator=(const EngineThread&) = delete;
  // Why there is no thread, if so: the kernel gave no eventfd. Every request is refused then.
  const absl::Status& status() const { return wake_.status(); }

  // Why a new request should not even be queued, if so (see Admission). Requests that are submitted
  // without having asked are taken all the same. Who has its whole answer has no place any more.
  absl::Status admit(bool stream, size_t choices);
  // What became of a request. `answered`: else its client left before it had what it waited for.
  void note_end(bool stream, bool answered, const RequestMetrics& metrics);
  uint64_t refused() const;
  // Nothing is under way: no request, and nothing that other engines wait for.
  bool idle() const;

  // Queues a request and returns the id it was given (request.id is not used). If the engine
  // refuses it, that is its only event, with FinishReason::kError. Events come on the engine's
  // thread, possibly before submit() has returned.
  uint64_t submit(Request request);
  // Does nothing if the request has ended.
  void abort(uint64_t id);

  // Aborts what is under way and ends the thread. A request that is submitted later is refused:
  // its only event has FinishReason::kError. May be called again; from one thread at a time.
  void stop();

  const std::string& fingerprint() const { return engine_.fingerprint(); }

  // Waits for no lock: the engine may be stuck with one.
  const Liveness& liveness() const { return engine_.liveness(); }

  // Has counted every request whose last event a client has heard; the rest is as of the last step.
  EngineStats stats() const;
  size_t max_context() const { return max_context_; }

 private:
  struct Command {
    bool is_abort = false;
    Request request;  // only the id of an abort
  };
  void loop();
  bool take_commands();
  void refuse_commands();
  void count_before_telling(Request* request);
  void take_notes(bool stepped, Time busy);

  Engine& engine_;
  const size_t max_context_;
  const base::EventFd wake_;
  mutable std::mutex mutex_;
  std::vector<Command> commands_;
  Admission admission_;
  size_t queued_ = 0;  // requests in commands_
  Backlog backlog_;
  EngineStats stats_;
  bool busy_ = false;      // see idle()
  bool stepping_ = false;  // no command waits; for the engine's thread
  uint64_t begun_ = 0;     // EngineStats::requests_begun, as admission_ has been told
  std::atomic<uint64_t> next_id_{1};
  std::atomic<bool> stop_{false};
  bool ended_ = false;  // no thread takes commands any more
  std::thread thread_;
};

}  // namespace baton::engine::serve
