// Shared by the tests of the HTTP face: a worker, its clients, and raw connections.
#pragma once

#include <httplib.h>

#include <nlohmann/json.hpp>

#include <arpa/inet.h>
#include <netinet/in.h>

#include "engine/http/http_server.h"
#include "engine/serve/engine_thread.h"
#include "tests/engine_model/test_model.h"
#include "tests/engine_serve/engine_fixture.h"
#include "tests/test.h"
#include "transport/clock.h"

namespace baton::engine::serve {

using nlohmann::json;

// One worker: engine, its thread, its server.
class Worker {
 public:
  explicit Worker(const Model& model = test_model(), EngineOptions options = {.blocks = 256},
                  http::HttpServerOptions server = {}, AdmissionOptions admission = {})
      : engine_(*Engine::create(model, test_tokenizer(), std::move(options))),
        thread_(std::make_unique<EngineThread>(*engine_, admission)) {
    if (server.port == http::HttpServerOptions{}.port) server.port = 0;
    if (server.model.empty()) server.model = "tiny";
    server_ = *http::HttpServer::start(std::move(server), *thread_, test_tokenizer());
  }
  int port() const { return server_->port(); }
  std::string url() const { return absl::StrCat("http://127.0.0.1:", port()); }
  EngineThread& thread() { return *thread_; }
  http::HttpServer& server() { return *server_; }
  // The engine goes down under its server.
  void stop_engine() { thread_->stop(); }

 private:
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<EngineThread> thread_;
  std::unique_ptr<http::HttpServer> server_;
};

// Waits for as long as it takes.
inline httplib::Client client_of(int port) {
  httplib::Client client("127.0.0.1", port);
  client.set_connection_timeout(patient(std::chrono::seconds(60)));
  client.set_read_timeout(patient(std::chrono::seconds(60)));
  client.set_write_timeout(patient(std::chrono::seconds(60)));
  return client;
}

inline json request_body() {
  return {{"prompt", "And it came to pass"},
          {"max_tokens", 24},
          {"temperature", 0.8},
          {"seed", 7},
          {"top_k", 50},
          {"ignore_eos", true},
          {"return_token_ids", true}};
}

inline httplib::Result post(int port, const json& body, const char* path = "/v1/completions") {
  httplib::Client client = client_of(port);
  return client.Post(path, body.dump(), "application/json");
}

inline json post_json(int port, const json& body, const char* path = "/v1/completions") {
  const httplib::Result result = post(port, body, path);
  EXPECT_TRUE(result) << httplib::to_string(result.error());
  EXPECT_EQ(result->status, 200) << result->body;
  return json::parse(result->body);
}

// What the events of a stream say. The last one of a whole stream says that it is done.
inline std::vector<json> events_in(const std::string& bytes) {
  std::vector<json> events;
  size_t begin = 0;
  for (size_t end; (end = bytes.find("\n\n", begin)) != std::string::npos; begin = end + 2) {
    const std::string line = bytes.substr(begin, end - begin);
    EXPECT_TRUE(line.starts_with("data: ")) << line;
    if (line != "data: [DONE]") {
      events.push_back(json::parse(line.substr(6)));
    } else {
      EXPECT_EQ(end + 2, bytes.size()) << bytes;
    }
  }
  EXPECT_EQ(begin, bytes.size());
  return events;
}

struct Streamed {
  std::string text;
  std::vector<int32_t> tokens;
  std::string finish_reason;
  json usage, logprobs;
  bool done = false;
};

inline Streamed parse_stream(const std::string& bytes, bool chat = false) {
  Streamed out;
  out.done = bytes.ends_with("data: [DONE]\n\n");
  for (const json& event : events_in(bytes)) {
    if (event.contains("usage")) out.usage = event["usage"];
    for (const json& choice : event["choices"]) {
      out.text +=
          chat ? choice["delta"]["content"].get<std::string>() : choice["text"].get<std::string>();
      if (choice.contains("token_ids")) {
        for (const json& token : choice["token_ids"]) out.tokens.push_back(token);
      }
      if (choice["finish_reason"].is_string()) out.finish_reason = choice["finish_reason"];
      const json logprobs = choice.value("logprobs", json());
      for (const auto& [key, values] : logprobs.items()) {
        for (const json& value : values) out.logprobs[key].push_back(value);
      }
    }
  }
  return out;
}

// A context long enough that a request outlives its client.
inline const Model& patient_model() {
  static const Model* model = [] {
    ModelConfig config = tiny_model_config();
    config.max_position_embeddings = 1 << 16;
    return new Model(*Model::create(make_test_checkpoint(config, 1)));
  }();
  return *model;
}

// A connection that sends what it is told and no more.
class RawClient {
 public:
  // `receive_buffer`: in the kernel; 0: as it likes.
  explicit RawClient(int port, int receive_buffer = 0)
      : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    if (receive_buffer > 0) {
      setsockopt(fd_, SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof(receive_buffer));
    }
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  }
  ~RawClient() { leave(); }
  RawClient(RawClient&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  RawClient& operator=(RawClient&&) = delete;

  void send(const std::string& bytes) {
    EXPECT_EQ(::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }
  void post(const std::string& path, const std::string& body, const std::string& headers = "") {
    send(absl::StrCat("POST ", path, " HTTP/1.1\r\nHost: x\r\nContent-Length: ", body.size(),
                      "\r\n", headers, "\r\n", body));
  }
  // What comes until `text` is among it, or the connection's end.
  std::string read_until(const std::string& text) {
    std::string all;
    char piece[4096];
    while (all.find(text) == std::string::npos) {
      const ssize_t count = recv(fd_, piece, sizeof(piece), 0);
      if (count <= 0) break;
      all.append(piece, static_cast<size_t>(count));
    }
    return all;
  }
  // So many bytes, or fewer at the connection's end.
  std::string read_bytes(size_t count) {
    std::string all(count, '\0');
    const ssize_t got = recv(fd_, all.data(), count, MSG_WAITALL);
    all.resize(got < 0 ? 0 : static_cast<size_t>(got));
    return all;
  }
  std::string read_to_end() { return read_until("\1 never \1"); }
  int fd() const { return fd_; }
  void leave() {
    if (fd_ >= 0) close(std::exchange(fd_, -1));
  }

 private:
  int fd_;
};

}  // namespace baton::engine::serve
