// What a connection may do: end its sending half, fold a header line (not), leave an answer unread
// (while there is room), have an event as long as it is, and speak TLS.
#include "absl/strings/match.h"
#include "engine/router/router.h"
#include "tests/engine_serve/http_fixture.h"
#include "tests/manual_clock.h"
#include "tests/test.h"
#include "tests/tls_files.h"

namespace baton::engine::serve {
namespace {

// Sends everything, then nothing more, and reads to the end.
std::string half_closed(int port, const json& body, int times = 1) {
  RawClient client(port);
  for (; times > 0; --times) client.post("/v1/completions", body.dump());
  EXPECT_EQ(shutdown(client.fd(), SHUT_WR), 0);
  return client.read_to_end();
}

TEST(HalfClosed, AClientThatSendsNoMoreGetsItsAnswer) {
  Worker worker;
  const auto router = *router::Router::start({.port = 0, .decode = {worker.url()}});
  json body = request_body();
  body["max_tokens"] = 200;
  const std::string want = post_json(worker.port(), body)["choices"][0].dump();
  const std::string text = json::parse(want)["text"];
  for (const int port : {worker.port(), router->port()}) {
    const std::string plain = half_closed(port, body);
    EXPECT_TRUE(absl::StrContains(plain, "HTTP/1.1 200 OK")) << plain;
    EXPECT_TRUE(absl::StrContains(plain, json(text).dump())) << plain;
    json stream = body;
    stream["stream"] = true;
    EXPECT_TRUE(absl::StrContains(half_closed(port, stream), "data: [DONE]"));
  }
}

TEST(HalfClosed, AllRequestsOfAPipelineAreAnswered) {
  Worker worker;
  const std::string both = half_closed(worker.port(), request_body(), 2);
  const size_t first = both.find("HTTP/1.1 200 OK");
  ASSERT_NE(first, std::string::npos) << both;
  EXPECT_NE(both.find("HTTP/1.1 200 OK", first + 1), std::string::npos) << both;
}

TEST(Engine, WhatComesAfterItsEndIsToldSo) {
  Worker worker(patient_model(), {.blocks = 8192});
  json body = request_body();
  body["max_tokens"] = 60000;
  RawClient open(worker.port());
  open.post("/v1/completions", body.dump());
  until([&] { return worker.server().connections().answering != 0; });
  worker.thread().stop();
  EXPECT_TRUE(absl::StartsWith(open.read_until("\r\n\r\n"), "HTTP/1.1 503"));
  for (const bool stream : {false, true}) {
    body["stream"] = stream;
    const httplib::Result late = post(worker.port(), body);
    ASSERT_TRUE(late);
    EXPECT_EQ(late->status, 503) << late->body;
    EXPECT_TRUE(absl::StrContains(late->body, "engine_stopped")) << late->body;
  }
  worker.thread().stop();
}

TEST(Heads, AFoldedLineIsRefused) {
  Worker worker;
  for (const char* fold : {"\r\n ", "\r\n\t", " \r\n  "}) {
    RawClient client(worker.port());
    client.send(
        absl::StrCat("GET /health HTTP/1.1\r\nHost: x\r\nX-Long: one", fold,
                     "two\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"));
    const std::string answer = client.read_to_end();
    EXPECT_TRUE(absl::StartsWith(answer, "HTTP/1.1 400")) << answer;
    EXPECT_FALSE(absl::StrContains(answer, "\"ok\"")) << answer;
  }
}

TEST(Heads, AreReadAsRfc9112HasThem) {
  http::HttpListener listener;
  listener.route("GET", "/", [](const std::shared_ptr<http::HttpExchange>& exchange) {
    exchange->reply(200, "text/plain", "at " + exchange->request().path);
  });
  listener.route("POST", "/", [](const std::shared_ptr<http::HttpExchange>& exchange) {
    exchange->reply(200, "text/plain", "got " + exchange->request().body);
  });
  ASSERT_TRUE(listener.listen("127.0.0.1", 0).ok());
  const std::string get = " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
  const std::string post =
      "POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n";
  const std::vector<std::pair<std::string, std::string>> cases = {
      // The absolute form, with or without a path.
      {"GET http://host/v1/models" + get, "at /v1/models"},
      {"GET HTTPS://[::1]:8000/v1/models?limit=1" + get, "at /v1/models"},
      {"GET http://host" + get, "at /"},
      {"GET http://host?limit=1" + get, "at /"},
      // Empty lines before a request, in pieces too.
      {"\r\nGET /a" + get, "at /a"},
      {"\r\n\r\n\r\nGET /a" + get, "at /a"},
      // One host.
      {"GET /a HTTP/1.1\r\nConnection: close\r\n\r\n", "HTTP/1.1 400"},
      {"GET /a HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", "HTTP/1.1 400"},
      {"GET /a HTTP/1.0\r\n\r\n", "at /a"},
      // A body's coding.
      {post + "Content-Encoding: identity\r\n\r\nab", "got ab"},
      {post + "Content-Encoding: gzip\r\n\r\nab", "HTTP/1.1 415 Unsupported Media Type"},
      {post + "Content-Encoding: gzip\r\n\r\nab", "Content-Encoding gzip is not supported"},
      {post + "Content-Encoding: br\r\n\r\nab", "Accept-Encoding: identity"}};
  for (const auto& [bytes, want] : cases) {
    RawClient whole(listener.port()), pieces(listener.port());
    whole.send(bytes);
    for (const char byte : bytes) pieces.send(std::string(1, byte));
    for (RawClient* client : {&whole, &pieces}) {
      const std::string answer = client->read_to_end();
      EXPECT_TRUE(absl::StrContains(answer, want)) << bytes << answer;
    }
  }
  // An empty line behind a body is no request.
  RawClient client(listener.port());
  client.send("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nab\r\nGET /b" + get);
  const std::string both = client.read_to_end();
  EXPECT_TRUE(absl::StrContains(both, "got ab")) << both;
  EXPECT_TRUE(absl::StrContains(both, "at /b")) << both;
  EXPECT_EQ(http::authority("::1", "80"), "[::1]:80");
  EXPECT_EQ(http::authority("127.0.0.1", "80"), "127.0.0.1:80");
}

// What a browser asks before it sends a page's request, and what it needs to show the answer to it.
TEST(Cors, PagesOfAllowedOriginsMayCall) {
  const auto answer = [](const std::vector<std::string>& allowed, const std::string& origin,
                         bool preflight) {
    Worker worker(test_model(), {.blocks = 64},
                  {.api_key = "open sesame", .listener = {.allowed_origins = allowed}});
    const auto router = *router::Router::start({.port = 0,
                                                .decode = {worker.url()},
                                                .api_key = "open sesame",
                                                .listener = {.allowed_origins = allowed}});
    std::string both;
    for (const int port : {worker.port(), router->port()}) {
      RawClient client(port);
      client.send(absl::StrCat(
          preflight ? "OPTIONS" : "GET", " /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n",
          "Origin: ", origin, "\r\n",
          preflight ? "Access-Control-Request-Method: POST\r\n"
                      "Access-Control-Request-Headers: authorization, x-mine\r\n"
                    : "Authorization: Bearer open sesame\r\n",
          "\r\n"));
      both += client.read_to_end();
    }
    return both;
  };
  const auto count = [](const std::string& text, const std::string& part) {
    int found = 0;
    for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; ++at) ++found;
    return found;
  };
  const std::string chat = "https://chat.example", allow = "Access-Control-Allow-Origin: ";
  // No key is asked for, since browsers send none with it.
  std::string got = answer({chat}, chat, true);
  EXPECT_EQ(count(got, "HTTP/1.1 200 OK"), 2) << got;
  EXPECT_EQ(count(got, allow + chat), 2) << got;
  EXPECT_EQ(count(got, "Access-Control-Allow-Methods: GET, POST"), 2) << got;
  EXPECT_EQ(count(got, "Access-Control-Allow-Headers: authorization, x-mine"), 2) << got;
  got = answer({"http://other.example", chat}, chat, false);
  EXPECT_EQ(count(got, "HTTP/1.1 200 OK"), 2) << got;
  EXPECT_EQ(count(got, allow + chat + "\r\n"), 2) << got;
  EXPECT_EQ(count(got, "Vary: Origin"), 2) << got;
  EXPECT_EQ(count(answer({"*"}, chat, true), allow + "*"), 2);
  // Others are told nothing, and the preflight is a request like any other.
  for (const std::vector<std::string>& allowed : {std::vector<std::string>{}, {chat + "2"}}) {
    for (const bool preflight : {true, false}) {
      got = answer(allowed, chat, preflight);
      EXPECT_EQ(count(got, allow), 0) << got;
      EXPECT_EQ(count(got, "HTTP/1.1 401"), preflight ? 2 : 0) << got;
    }
  }
}

using Exchange = std::shared_ptr<http::HttpExchange>;

const std::string kHealth = "GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";

// Answers that are longer than all that the kernel takes of them, and short ones.
class LongAnswers {
 public:
  static constexpr size_t kLong = size_t{24} << 20;

  explicit LongAnswers(http::HttpListenerOptions options) : listener_(std::move(options)) {
    listener_.route("GET", "/health",
                    [](const Exchange& exchange) { exchange->reply(200, "text/plain", "ok"); });
    listener_.route("GET", "/long", [](const Exchange& exchange) {
      exchange->reply(200, "text/plain", std::string(kLong, 'x'));
    });
    EXPECT_TRUE(listener_.listen("127.0.0.1", 0).ok());
  }
  // A client that has seen its answer begin, and reads no more.
  RawClient unread(int receive_buffer = 0) const {
    RawClient client(listener_.port(), receive_buffer);
    client.send("GET /long HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    EXPECT_TRUE(absl::StrContains(client.read_until("\r\n\r\n"), " 200 OK"));
    return client;
  }
  std::string health() const {
    RawClient client(listener_.port());
    client.send(kHealth);
    return client.read_to_end();
  }
  http::HttpListener& listener() { return listener_; }

 private:
  http::HttpListener listener_;
};

constexpr std::chrono::milliseconds kUnread(5000);

// Promise(serving): Clients that leave answers unread keep no client out | the connection that kept
//   the server waiting longest goes
TEST(Room, AnUnreadingPeerMakesRoom) {
  ManualClock clock;
  LongAnswers server({.max_connections = 3, .unread_after = kUnread, .clock = &clock});
  std::vector<RawClient> strangers;
  for (int i = 0; i < 3; ++i) strangers.push_back(server.unread());
  EXPECT_EQ(server.health(), "");  // the oldest answer is still young
  // One that moved since the last look is spared, so it may have to come again.
  until([&] {
    clock.advance(kUnread);
    return absl::StrContains(server.health(), " 200 OK");
  });
  size_t cut = 0;
  for (RawClient& stranger : strangers) {
    cut += stranger.read_bytes(LongAnswers::kLong).size() < LongAnswers::kLong / 2 ? 1 : 0;
  }
  EXPECT_EQ(cut, 1u);
}

TEST(Room, AnAnswerThatIsReadOnKeepsIts) {
  ManualClock clock;
  LongAnswers server({.max_connections = 1, .unread_after = kUnread, .clock = &clock});
  constexpr int kBuffer = 1 << 18;  // of the client's kernel
  RawClient reader = server.unread(kBuffer);
  size_t read = 0;
  for (int i = 0; i < 3; ++i) {
    clock.advance(2 * kUnread);
    // More than the kernel had at once: so the server's has heard that some of it was taken, if
    // not enough for there to be room for more.
    read += reader.read_bytes(2 * kBuffer).size();
    EXPECT_EQ(server.health(), "");
  }
  EXPECT_EQ(read, 6u * kBuffer);
  const size_t rest = LongAnswers::kLong - read - 4096;  // read_bytes() began in its midst
  EXPECT_EQ(reader.read_bytes(rest).size(), rest);
}

TEST(Room, ARefusedClientMakesRoom) {
  LongAnswers server({.max_connections = 2});
  RawClient one(server.listener().port()), two(server.listener().port());
  for (RawClient* stranger : {&one, &two}) {
    stranger->send("nonsense\r\n\r\n");  // and does not hang up
    EXPECT_TRUE(absl::StartsWith(stranger->read_to_end(), "HTTP/1.1 400"));
  }
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(absl::StrContains(server.health(), " 200 OK")) << i;
  }
}

TEST(Events, OneMayBeLongerThanTheLimit) {
  http::HttpListener listener({.max_unsent = size_t{64} << 10});
  const std::string above(size_t{1} << 20, 'x'), below(size_t{40} << 10, 'y');
  const auto writes = [&](const char* path, std::vector<std::string> events) {
    listener.route("GET", path, [events = std::move(events)](const Exchange& exchange) {
      exchange->begin(200, "text/event-stream");
      for (const std::string& event : events) exchange->write(event);
      exchange->end();
    });
  };
  writes("/above", {above, below});
  writes("/first", {below, above});
  writes("/twice", {above, above});
  writes("/below", {below, below});
  ASSERT_TRUE(listener.listen("127.0.0.1", 0).ok());
  const auto read = [&](const char* path) {
    RawClient client(listener.port());
    client.send(absl::StrCat("GET ", path, " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"));
    return client.read_to_end();
  };
  for (const char* path : {"/above", "/first"}) {
    const std::string all = read(path);
    EXPECT_GT(all.size(), above.size() + below.size()) << path;
    EXPECT_TRUE(absl::EndsWith(all, "\r\n0\r\n\r\n")) << path;
  }
  EXPECT_EQ(listener.stats().timed_out, 0u);
  // What lies besides it still has its limit.
  for (const char* path : {"/twice", "/below"}) {
    EXPECT_FALSE(absl::EndsWith(read(path), "\r\n0\r\n\r\n")) << path;
  }
  EXPECT_EQ(listener.stats().timed_out, 2u);
}

// Promise(serving): The key is asked for before a body is read | 401 behind the head
TEST(Keys, AreAskedForBeforeTheBodyIsRead) {
  Worker worker(test_model(), {.blocks = 64}, {.api_key = "open sesame"});
  for (const char* body :
       {"Content-Length: 16000000\r\n", "Content-Length: 16000000\r\nExpect: 100-continue\r\n",
        "Transfer-Encoding: chunked\r\n"}) {
    RawClient stranger(worker.port());
    stranger.send(absl::StrCat("POST /v1/completions HTTP/1.1\r\nHost: x\r\n", body, "\r\n"));
    const std::string answer = stranger.read_to_end();
    EXPECT_TRUE(absl::StartsWith(answer, "HTTP/1.1 401")) << answer;
    EXPECT_TRUE(absl::StrContains(answer, "Connection: close")) << answer;
    EXPECT_TRUE(absl::StrContains(answer, "X-Request-Id: ")) << answer;
  }
  // Without a body nothing is in the way of the next request.
  RawClient client(worker.port());
  client.send("GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n" + kHealth);
  const std::string both = client.read_to_end();
  EXPECT_TRUE(absl::StartsWith(both, "HTTP/1.1 401")) << both;
  EXPECT_TRUE(absl::StrContains(both, "HTTP/1.1 200")) << both;
  RawClient friendly(worker.port());
  friendly.post("/v1/completions", request_body().dump(),
                "Authorization: Bearer open sesame\r\nConnection: close\r\n");
  EXPECT_TRUE(absl::StartsWith(friendly.read_to_end(), "HTTP/1.1 200"));
}

TEST(Heads, AreAllThatHeadIsAnsweredWith) {
  Worker worker;
  for (const char* path : {"/metrics", "/health", "/nowhere"}) {
    RawClient client(worker.port());
    client.send(absl::StrCat("HEAD ", path, " HTTP/1.1\r\nHost: x\r\n\r\n", kHealth));
    const std::string answers = client.read_to_end();
    const size_t end = answers.find("\r\n\r\n");
    ASSERT_NE(end, std::string::npos) << answers;
    EXPECT_TRUE(absl::StartsWith(answers.substr(end + 4), "HTTP/1.1 200 OK\r\n")) << answers;
  }
}

httplib::Result post_tls(int port, const json& body, const std::string& key) {
  httplib::SSLClient client("localhost", port);
  client.enable_server_certificate_verification(false);
  client.set_read_timeout(patient(std::chrono::seconds(60)));
  client.set_write_timeout(patient(std::chrono::seconds(60)));
  return client.Post("/v1/completions", {{"Authorization", "Bearer " + key}}, body.dump(),
                     "application/json");
}

// The router reaches its worker by it, too.
TEST(Tls, AServerAndARouterServeByItAndAskForTheKey) {
  const TlsFiles files("server");
  Worker plain;
  Worker worker(test_model(), {.blocks = 256},
                {.api_key = "open sesame", .listener = files.options()});
  const auto router =
      *router::Router::start({.port = 0,
                              .decode = {absl::StrCat("https://localhost:", worker.port())},
                              .api_key = "open sesame",
                              .worker_ca = files.certificate,
                              .listener = files.options()});
  json body = request_body();
  const json want = post_json(plain.port(), body)["choices"][0]["text"];
  json long_one = body;
  long_one["prompt"] = std::string(size_t{1} << 20, ' ');
  for (const int port : {worker.port(), router->port()}) {
    body["stream"] = false;
    const httplib::Result whole = post_tls(port, body, "open sesame");
    ASSERT_TRUE(whole) << httplib::to_string(whole.error());
    ASSERT_EQ(whole->status, 200) << whole->body;
    EXPECT_EQ(json::parse(whole->body)["choices"][0]["text"], want);
    body["stream"] = true;
    const httplib::Result streamed = post_tls(port, body, "open sesame");
    ASSERT_TRUE(streamed) << httplib::to_string(streamed.error());
    EXPECT_EQ(parse_stream(streamed->body).text, want);
    EXPECT_EQ(post_tls(port, body, "close sesame")->status, 401);
    const httplib::Result refused = post_tls(port, long_one, "open sesame");  // many records
    ASSERT_TRUE(refused) << httplib::to_string(refused.error());
    EXPECT_EQ(refused->status, 400);
    EXPECT_TRUE(absl::StrContains(refused->body, "longer than")) << refused->body;
  }
}

TEST(Tls, ManyRequestsOnOneConnection) {
  const TlsFiles files("server");
  Worker worker(test_model(), {.blocks = 256}, {.listener = files.options()});
  httplib::SSLClient client("localhost", worker.port());
  client.enable_server_certificate_verification(false);
  client.set_keep_alive(true);
  client.set_read_timeout(patient(std::chrono::seconds(60)));
  for (int i = 0; i < 5; ++i) {
    const httplib::Result health = client.Get("/health");
    ASSERT_TRUE(health) << httplib::to_string(health.error());
    EXPECT_EQ(health->status, 200);
  }
}

TEST(Tls, PlainTextClientsAreClosed) {
  const TlsFiles files("server");
  http::HttpServerOptions options{.listener = files.options()};
  options.listener.head_timeout = std::chrono::milliseconds(50);
  Worker worker(test_model(), {.blocks = 64}, options);
  RawClient plain(worker.port()), silent(worker.port());
  plain.send("GET /health HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_FALSE(absl::StrContains(plain.read_to_end(), "ok"));
  EXPECT_EQ(silent.read_to_end(), "");
}

TEST(Tls, FilesThatAreWrongAreNamed) {
  const TlsFiles files("server"), others("other");
  const auto start = [](const std::string& certificate, const std::string& key) {
    http::HttpListenerOptions options;
    options.tls_certificate = certificate;
    options.tls_key = key;
    http::HttpListener listener(options);
    const absl::Status status = listener.listen("127.0.0.1", 0);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    return std::string(status.message());
  };
  EXPECT_TRUE(absl::StrContains(start("/nowhere.pem", files.key), "/nowhere.pem"));
  EXPECT_TRUE(absl::StrContains(start(files.certificate, files.certificate), "key"));
  EXPECT_TRUE(absl::StrContains(start(files.certificate, others.key), others.key));
  EXPECT_TRUE(absl::StrContains(start(files.certificate, ""), "both"));
  const auto refused =
      router::Router::start({.port = 0, .decode = {"https://x:1"}, .worker_ca = files.key});
  EXPECT_TRUE(absl::StrContains(refused.status().message(), files.key)) << refused.status();
}

}  // namespace
}  // namespace baton::engine::serve
