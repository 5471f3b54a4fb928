// One request to the engine behind HTTP: its choices go in, their events come out as one reply.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "engine/http/http_listener.h"
#include "engine/http/openai/openai_reply.h"
#include "engine/http/openai/openai_request.h"
#include "engine/serve/engine_thread.h"
#include "engine/serve/liveness.h"
#include "engine/serve/metrics.h"
#include "engine/serve/requests/request.h"
#include "engine/tokenizer/tokenizer.h"

namespace baton::engine::http {

// An engine's event that may outlive the call in which it came.

struct StreamedEvent {
  serve::OutputEvent event;
  serve::RequestMetrics metrics;           // of the last event, which points here
  std::vector<serve::TokenChoice> prompt;  // of the first one, which points here

  static StreamedEvent copy(const serve::OutputEvent& source) {
    StreamedEvent copied{source, {}, {}};
    if (source.metrics != nullptr) copied.metrics = *source.metrics;
    copied.event.metrics = nullptr;
    if (source.prompt != nullptr) copied.prompt = *source.prompt;
    copied.event.prompt = nullptr;
    // A status of its own: copies share their message, and the engine's thread goes on with its.
    copied.event.status = absl::Status(source.status.code(), std::string(source.status.message()));
    if (source.status.GetPayload(serve::kStoppedPayload).has_value()) {
      copied.event.status.SetPayload(serve::kStoppedPayload, absl::Cord());
    }
    return copied;
  }
  const serve::OutputEvent& view() {
    event.metrics = event.finished ? &metrics : nullptr;
    event.prompt = prompt.empty() ? nullptr : &prompt;
    return event;
  }
};

// The state that all completions of a server share.
struct CompletionHost {
  serve::EngineThread& engine;
  const Tokenizer& tokenizer;
  std::string model;
  std::weak_ptr<EventLoop> loop;
  // Shared with requests, whose last event may come after the server is gone.
  std::shared_ptr<serve::ServingMetrics> metrics = std::make_shared<serve::ServingMetrics>();
};

// True if the requester needs only the first token for now.
bool waits_for_first_token(const HttpRequest& asked, const ApiRequest& request);

// Made by start(); lives until its last event. A client that leaves, at whatever moment, has all
// its choices aborted. A choice that fails ends the others: before the first byte of the answer the
// client gets an error's status, in a stream an event with the error.
class Completion : public std::enable_shared_from_this<Completion> {
 public:
  // Submits every choice. From any thread. `prompts` are the tokens of request->prompts.
  // ResourceExhausted if the engine has too much to do; then nothing was submitted.
  static absl::Status start(const CompletionHost& host, std::shared_ptr<HttpExchange> exchange,
                            std::shared_ptr<const ApiRequest> request,
                            std::vector<std::vector<int32_t>> prompts);

  Completion(const CompletionHost& host, std::shared_ptr<HttpExchange> exchange,
             std::shared_ptr<const ApiRequest> request, std::vector<size_t> prompt_lengths);

 private:
  void submit(std::vector<std::vector<int32_t>> prompts);
  void push(size_t choice, const serve::OutputEvent& event);  // on the engine's thread
  void drain();                                               // on the loop's
  void handle(size_t choice, StreamedEvent event, std::string* bytes);
  void abort();

  const CompletionHost host_;
  const std::shared_ptr<HttpExchange> exchange_;
  const std::shared_ptr<const ApiRequest> request_;
  const bool first_token_;  // is waited for, not the last
  ApiReply reply_;
  bool over_ = false;  // the reply is out; of the loop's thread

  std::mutex mutex_;
  std::vector<uint64_t> ids_;
  bool aborted_ = false;
  std::deque<std::pair<size_t, StreamedEvent>> events_;
  bool draining_ = false;  // drain() is on its way
};

}  // namespace baton::engine::http
