// The engine over HTTP: OpenAI's completions and chat, plain and streamed, health and metrics.
//
//   POST /v1/completions, /v1/chat/completions   see engine/http/openai_request.h
//   GET  /v1/models, /health, /metrics
//   GET  /v1/baton/address                       {"address": ...}: the KvConnector's, for routers
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "engine/serve/engine_thread.h"
#include "engine/tokenizer/tokenizer.h"

namespace baton::engine::http {

struct HttpServerOptions {
  std::string host = "127.0.0.1";
  int port = 8000;         // 0: any free port
  int connections = 64;    // served at the same time; more wait
  std::string model;       // its name for clients
  std::string kv_address;  // KvConnector::address(), "" without one
};

// Serves on threads of its own from start() until it is destroyed. A client that goes away has its
// request aborted.
class HttpServer {
 public:
  // Unavailable if the port is taken. `engine` and `tokenizer` must outlive the server.
  static absl::StatusOr<std::unique_ptr<HttpServer>> start(HttpServerOptions options,
                                                           serve::EngineThread& engine,
                                                           const Tokenizer& tokenizer);
  ~HttpServer();

  int port() const;

 private:
  struct Impl;
  explicit HttpServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace baton::engine::http
