// Workers that join and leave: the file that lists them, and what a router makes of it.
#include "engine/http/http_listener.h"
#include "engine/http/openai/openai_reply.h"
#include "engine/router/worker_list.h"
#include "tests/routing/routing_fixture.h"
#include "tests/test.h"
#include "transport/base/log.h"

namespace baton::engine::serve {
namespace {

TEST(WorkerList, SaysRolesAndAddresses) {
  const auto listed = router::parse_worker_list(
      "# ours\n\n  prefill http://10.0.0.1:8001\r\ndecode\thttp://[::1]:8002 # the quick one\n"
      "decode http://h/\n");
  ASSERT_TRUE(listed.ok()) << listed.status();
  ASSERT_EQ(listed->prefill.size(), 1u);
  EXPECT_EQ(listed->prefill[0].text(), "http://10.0.0.1:8001");
  ASSERT_EQ(listed->decode.size(), 2u);
  EXPECT_EQ(listed->decode[0].text(), "http://[::1]:8002");
  EXPECT_EQ(listed->decode[1].text(), "http://h:80");
}

TEST(WorkerList, RefusesWhatMayBeAMistake) {
  const struct {
    const char* text;
    const char* reason;
  } cases[] = {
      {"", "no decode worker"},
      {"# decode http://h:1\n", "no decode worker"},
      {"prefill http://h:1\n", "no decode worker"},
      {"decode http://h:1\ndecode http://h:80", "half written"},
      {"decode http://h:1\nworker http://h:2\n", "line 2"},
      {"decode\n", "line 1"},
      {"decode http://h:1 http://h:2\n", "line 1: nothing may stand behind the URL: remove http://h:2"},
      {"decode ftp://h:1\n", "ftp://h:1"},
      {"decode http://h:1\n\nprefill http://h:1\n", "line 3: http://h:1 is listed already"},
  };
  for (const auto& bad : cases) {
    const absl::Status status = router::parse_worker_list(bad.text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad.text;
    EXPECT_NE(status.message().find(bad.reason), absl::string_view::npos) << status;
  }
}

// What is logged while it lives, by whichever thread.
class LogText {
 public:
  LogText() {
    base::set_log_sink([this](base::LogLevel, std::string_view line) {
      const std::lock_guard lock(mutex_);
      text_.append(line);
    });
  }
  ~LogText() { base::set_log_sink(nullptr); }
  bool has(const std::string& words) {
    const std::lock_guard lock(mutex_);
    return text_.find(words) != std::string::npos;
  }

 private:
  std::mutex mutex_;
  std::string text_;
};

// As a careful operator changes it: at once. Readers see the old list or the new one.
void write_list(const TemporaryFolder& folder, const std::string& text) {
  std::ofstream(folder.path("new")) << text;
  ASSERT_EQ(std::rename(folder.path("new").c_str(), folder.path("workers").c_str()), 0);
}

router::RouterOptions by_list(const TemporaryFolder& folder) {
  router::RouterOptions options{.port = 0, .workers_file = folder.path("workers")};
  options.health_interval = std::chrono::milliseconds(10);
  return options;
}

TEST(RoutingList, RefusesToStartWithABadOne) {
  TemporaryFolder folder;
  EXPECT_EQ(router::Router::start(by_list(folder)).status().code(), absl::StatusCode::kNotFound);
  write_list(folder, "decode somewhere\n");
  const absl::Status status = router::Router::start(by_list(folder)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("line 1"), absl::string_view::npos) << status;
  write_list(folder, "decode http://127.0.0.1:1\n");
  router::RouterOptions both = by_list(folder);
  both.decode = {"http://127.0.0.1:1"};
  EXPECT_EQ(router::Router::start(both).status().code(), absl::StatusCode::kInvalidArgument);
}

// Promise(serving): Workers join and leave a router by a file; a nonsensical file changes nothing |
//   the list is read whole and compared
TEST(RoutingList, WorkersJoinAndLeaveAsItSays) {
  TemporaryFolder folder;
  TokenizerFolder tokenizer;
  Worker first, second;
  LogText log;
  write_list(folder, absl::StrCat("decode ", first.url(), "\n"));
  router::RouterOptions options = by_list(folder);
  options.tokenizer = tokenizer.path();
  const auto router = *router::Router::start(options);
  const auto of = [&](const char* name, const Worker& worker) {
    return of_worker(router->port(), name, worker.url());
  };
  post_json(router->port(), request_body());
  EXPECT_EQ(first.thread().stats().requests_finished, 1u);
  EXPECT_EQ(of("worker_up", second), -1);
  write_list(folder, absl::StrCat("decode ", first.url(), "\ndecode ", second.url(), "\n"));
  until([&] { return of("worker_up", second) == 1 && of("cache_known", second) == 1; });
  write_list(folder, absl::StrCat("decode ", second.url(), "\n"));
  until([&] { return of("worker_up", first) == -1; });
  post_json(router->port(), request_body());
  EXPECT_EQ(first.thread().stats().requests_finished, 1u);
  // Nothing changes while the list makes no sense, or there is none.
  write_list(folder, "decode nowhere\n");
  until([&] { return log.has("line 1"); });
  std::remove(folder.path("workers").c_str());
  until([&] { return log.has("No such file"); });
  EXPECT_EQ(of("worker_up", second), 1);
  post_json(router->port(), request_body());
  EXPECT_EQ(first.thread().stats().requests_finished, 1u);
  // And back again.
  write_list(folder, absl::StrCat("decode ", first.url(), "\n"));
  until([&] { return of("worker_up", first) == 1 && of("worker_up", second) == -1; });
  post_json(router->port(), request_body());
  EXPECT_EQ(first.thread().stats().requests_finished, 2u);
}

// Sends the first of two tokens at once, and the second when it is told to.
class WaitingWorker {
 public:
  WaitingWorker() {
    listener_.route("GET", "/health", [](const std::shared_ptr<http::HttpExchange>& exchange) {
      exchange->reply(200, "application/json", "{}");
    });
    listener_.route("POST", "/v1/completions",
                    [this](const std::shared_ptr<http::HttpExchange>& exchange) {
                      const std::lock_guard lock(mutex_);
                      exchange->begin(200, "text/event-stream");
                      exchange->write(token(11, nullptr));
                      exchange_ = exchange;
                    });
    EXPECT_TRUE(listener_.listen("127.0.0.1", 0).ok());
  }
  ~WaitingWorker() { listener_.stop(); }
  std::string url() const { return absl::StrCat("http://127.0.0.1:", listener_.port()); }
  void go_on() {
    const std::lock_guard lock(mutex_);
    exchange_->write(
        token(22, "length") +
        http::sse(
            {{"id", "w"}, {"choices", json::array()}, {"usage", {{"completion_tokens", 2}}}}) +
        std::string(http::kSseDone));
    exchange_->end();
  }

 private:
  static std::string token(int id, const json& finish_reason) {
    return http::sse({{"id", "w"},
                      {"object", "text_completion"},
                      {"created", 1},
                      {"model", "m"},
                      {"choices",
                       {{{"index", 0},
                         {"text", absl::StrCat("<", id, ">")},
                         {"logprobs", nullptr},
                         {"finish_reason", finish_reason},
                         {"token_ids", {id}}}}}});
  }

  http::HttpListener listener_;
  std::mutex mutex_;
  std::shared_ptr<http::HttpExchange> exchange_;
};

TEST(RoutingList, ADepartingWorkerEndsItsRequests) {
  TemporaryFolder folder;
  WaitingWorker leaving;
  Worker staying;
  write_list(folder, absl::StrCat("decode ", leaving.url(), "\n"));
  const auto router = *router::Router::start(by_list(folder));
  RawClient client(router->port());
  client.post("/v1/completions", json{{"prompt", "x"}, {"stream", true}}.dump());
  EXPECT_NE(client.read_until("<11>").find("<11>"), std::string::npos);
  write_list(folder, absl::StrCat("decode ", staying.url(), "\n"));
  httplib::Client http("127.0.0.1", router->port());
  until([&] {
    const httplib::Result page = http.Get("/health");
    return page && page->body.find("\"draining\":true") != std::string::npos;
  });
  until([&] { return of_worker(router->port(), "worker_up", staying.url()) == 1; });
  post_json(router->port(), request_body());  // by the other
  leaving.go_on();
  EXPECT_NE(client.read_until("[DONE]").find("<22>"), std::string::npos);
  until([&] { return of_worker(router->port(), "in_flight", leaving.url()) == -1; });
  EXPECT_EQ(metric(router->port(), "baton_router_retries_total"), 0);
}

}  // namespace
}  // namespace baton::engine::serve
