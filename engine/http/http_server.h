// The engine over HTTP: OpenAI's completions and chat, plain and streamed, health and metrics.
//
//   POST /v1/completions, /v1/chat/completions   see engine/http/openai/openai_request.h
//   GET  /v1/models, /v1/models/ID              the one that is served; 404 for another ID
//   POST /tokenize, /detokenize                  as vLLM's
//   GET  /health         200, or 503 with the reason: the engine has stopped, or has work and does
//                        not get on with it. In both: for how many seconds ("quiet_s"), the
//                        weights' fingerprint ("model"), and the agent that takes part in
//                        hand-offs by kv_transfer_params, if there is one ("kv_agent": name and
//                        address), and "draining" where the server is about to end
//   GET  /metrics, /version
//   GET  /v1/baton/address                       as /health, and "address": the KvConnector's, for
//                                                routers
//
// Every answer has the header X-Request-Id: the client's own, or a new one.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "engine/http/http_listener.h"
#include "engine/serve/engine_thread.h"
#include "engine/tokenizer/chat_template.h"
#include "engine/tokenizer/tokenizer.h"
#include "transport/clock.h"

namespace baton::engine::http {

struct HttpServerOptions {
  std::string host = "127.0.0.1";
  int port = 8000;    // 0: any free port
  std::string model;  // its name for clients; another one in a request is a 404
  // The model's own; without one a chat is rendered as render_chat() does.
  std::optional<ChatTemplate> chat_template;
  serve::SamplingDefaults defaults;  // of requests that say nothing
  std::string kv_address;            // Engine::kv_address(), "" without a session
  std::string kv_agent;              // of hand-offs, by kv_transfer_params; "" without one
  std::string kv_agent_address;      // HOST:PORT, of rank 0; rank k listens on the port plus k
  int kv_agent_ranks = 1;
  // Asked of clients under /v1 and of /tokenize and /detokenize, as "Authorization: Bearer KEY";
  // "": of none.
  std::string api_key;
  // The engine is not well when it has had work for so long and got nowhere: no step has ended, and
  // within one no layer. Zero: however long.
  Time stuck_after = patient(std::chrono::seconds(10));
  // Lines for /metrics besides the engine's own; called on the loop's thread.
  std::function<std::string()> more_metrics;
  HttpListenerOptions listener;
};

// Serves on threads of its own, whose number does not depend on that of the clients, from start()
// until it is destroyed. A client that goes away has its request aborted, at whatever moment.
class HttpServer {
 public:
  // AlreadyExists if the port is taken, else as net::listen_on() says. `engine` and `tokenizer`
  // must outlive the server.
  static absl::StatusOr<std::unique_ptr<HttpServer>> start(HttpServerOptions options,
                                                           serve::EngineThread& engine,
                                                           const Tokenizer& tokenizer);
  ~HttpServer();

  // Shuts down in order: requests that come from here on are refused (503, Retry-After), /health
  // says 503 and "draining", and what is under way goes on.
  void drain();
  // Whether nothing is under way any more, here or in the engine.
  bool drained() const;
  // Ends what is under way: its clients get an error, in a stream as an event. The engine computes
  // no more.
  void end_requests();

  int port() const;
  HttpListenerStats connections() const;

 private:
  struct Impl;
  explicit HttpServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace baton::engine::http
