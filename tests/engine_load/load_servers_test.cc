// Loads on a server of ours, and on servers that refuse, break off, or answer as others do.
#include "engine/demo/demo.h"
#include "engine/http/http_listener.h"
#include "engine/load/load.h"
#include "tests/engine_serve/http_fixture.h"
#include "tests/test.h"

namespace baton::engine::load {
namespace {

using testing::HasSubstr;

class Loads : public testing::Test {
 protected:
  Loads() { loop_->start(); }
  ~Loads() override { loop_->stop(); }

  Server server_at(int port) const {
    return {.url = *http::HttpUrl::parse(absl::StrCat("http://127.0.0.1:", port)), .model = "tiny"};
  }

  const std::shared_ptr<http::EventLoop> loop_ = std::make_shared<http::EventLoop>();
};

// Answers completions by a function; all else is not there.
class ScriptedServer {
 public:
  explicit ScriptedServer(http::HttpHandler handler) {
    listener_.route("POST", "/v1/completions", std::move(handler));
    const absl::Status status = listener_.listen("127.0.0.1", 0);
    EXPECT_TRUE(status.ok()) << status;
  }
  int port() const { return listener_.port(); }

 private:
  http::HttpListener listener_;
};

const std::string kToken = R"(data: {"choices":[{"index":0,"text":"a"}]})"
                           "\n\n";
const std::string kUsage =
    R"(data: {"choices":[],"usage":{"prompt_tokens":6,"completion_tokens":4}})"
    "\n\n";
const std::string kDone = "data: [DONE]\n\n";

TEST_F(Loads, OursAnswersPromptsOfTokensInTheirLength) {
  const serve::Worker worker;
  const Server server = server_at(worker.port());
  EXPECT_EQ(*model_of(loop_, server), "tiny");
  const auto words = words_of(loop_, server, demo::kDemoPrompts);
  ASSERT_TRUE(words.ok()) << words.status();
  EXPECT_GT(words->tokens.size(), 10u);
  const auto requests =
      *make_workload({.dataset = "random", .requests = 12, .output = 5, .input = 40}, *words);
  const LoadResult result = run_load(loop_, server, requests, {.concurrency = 3});
  ASSERT_EQ(result.answers.size(), 12u);
  EXPECT_EQ(result.most_open, 3u);
  for (const Answer& answer : result.answers) {
    EXPECT_TRUE(answer.ok()) << answer.error;
    EXPECT_EQ(answer.input, 40u);
    EXPECT_EQ(answer.output, 5u);
    EXPECT_EQ(answer.gaps.size(), 4u);
    EXPECT_GT(answer.first, Time{});
    EXPECT_GE(answer.end, answer.first);
    EXPECT_GE(answer.first, answer.queued);
    EXPECT_EQ(answer.kv_wait, Time{});
    EXPECT_LE(answer.sent + answer.end, result.duration);
  }
}

TEST_F(Loads, NoMoreAreOpenThanMayBe) {
  std::mutex mutex;
  std::vector<std::shared_ptr<http::HttpExchange>> open;
  std::atomic<size_t> most{0};
  ScriptedServer scripted([&](const std::shared_ptr<http::HttpExchange>& exchange) {
    const std::lock_guard lock(mutex);
    open.push_back(exchange);
    most = std::max(most.load(), open.size());
    if (open.size() < 4) return;  // all four of them, and not before
    for (const auto& each : open) each->reply(200, "text/event-stream", kToken + kUsage + kDone);
    open.clear();
  });
  const LoadResult result =
      run_load(loop_, server_at(scripted.port()), std::vector<LoadRequest>(20, {.text = "x"}),
               {.concurrency = 4});
  EXPECT_EQ(most, 4u);
  EXPECT_EQ(result.most_open, 4u);
  for (const Answer& answer : result.answers) EXPECT_TRUE(answer.ok()) << answer.error;
}

TEST_F(Loads, RequestsFollowTheScheduleNotTheAnswers) {
  std::mutex mutex;
  std::vector<std::shared_ptr<http::HttpExchange>> open;
  ScriptedServer scripted([&](const std::shared_ptr<http::HttpExchange>& exchange) {
    const std::lock_guard lock(mutex);
    open.push_back(exchange);
    if (open.size() < 3) return;  // nobody is answered before the last has been sent
    for (const auto& each : open) each->reply(200, "text/event-stream", kToken + kUsage + kDone);
  });
  const std::vector<Time> at = {Time{}, std::chrono::milliseconds(20),
                                std::chrono::milliseconds(40)};
  const LoadResult result = run_load(loop_, server_at(scripted.port()),
                                     std::vector<LoadRequest>(3, {.text = "x"}), {.at = at});
  EXPECT_EQ(result.most_open, 3u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(result.answers[i].ok()) << result.answers[i].error;
    EXPECT_GE(result.answers[i].sent, at[i]);
    EXPECT_EQ(result.answers[i].output, 4u) << "the server's own count is right";
  }
}

TEST_F(Loads, WhatIsNoAnswerIsSaid) {
  std::atomic<int> turn{0};
  ScriptedServer scripted([&](const std::shared_ptr<http::HttpExchange>& exchange) {
    switch (turn++) {
      case 0:
        return exchange->reply(429, "application/json", R"({"error":{"message":"too busy"}})");
      case 1:
        return exchange->reply(200, "text/event-stream", kToken);  // and no end
      case 2:
        return exchange->reply(
            200, "text/event-stream",
            kToken + "data: {\"error\":{\"message\":\"went wrong\"}}\n\n" + kDone);
      case 3:
        return exchange->reply(200, "text/event-stream", kUsage + kDone);
      default:
        return;  // the exchange goes without a word: HTTP 500
    }
  });
  const LoadResult result =
      run_load(loop_, server_at(scripted.port()), std::vector<LoadRequest>(5, {.text = "x"}),
               {.concurrency = 1});
  EXPECT_EQ(result.answers[0].error, "HTTP 429: too busy");
  EXPECT_THAT(result.answers[1].error, HasSubstr("[DONE]"));
  EXPECT_EQ(result.answers[2].error, "went wrong");
  EXPECT_THAT(result.answers[3].error, HasSubstr("no token"));
  EXPECT_THAT(result.answers[4].error, HasSubstr("HTTP 500"));
}

TEST_F(Loads, AMissingServerIsReportedPerRequest) {
  constexpr int kNobodys = 1;
  const LoadResult result =
      run_load(loop_, server_at(kNobodys), std::vector<LoadRequest>(3, {.text = "x"}), {});
  for (const Answer& answer : result.answers) EXPECT_FALSE(answer.ok());
  EXPECT_THAT(std::string(model_of(loop_, server_at(kNobodys)).status().message()),
              HasSubstr("is a server running there?"));
}

TEST_F(Loads, AServerWithoutATokenizerSaysWhatToDo) {
  ScriptedServer scripted([](const auto&) {});
  EXPECT_THAT(std::string(words_of(loop_, server_at(scripted.port()), "text").status().message()),
              HasSubstr("--dataset-name text"));
}

// It is told of a prompt's KV how long it was awaited: tests/engine_serve has that of real ones.
TEST_F(Loads, WhatBatonsServersTellBesidesIsRead) {
  ScriptedServer scripted([](const std::shared_ptr<http::HttpExchange>& exchange) {
    exchange->reply(
        200, "text/event-stream",
        kToken +
            R"(data: {"choices":[],"usage":{"prompt_tokens":64,"completion_tokens":1,"prompt_tokens_details":)"
            R"({"cached_tokens":16,"kv_loaded_tokens":32,"queued_ms":1.5,"kv_wait_ms":2.25,)"
            R"("kv_load_error":"slow"}}})"
            "\r\n\r\n" +
            kDone);
  });
  const LoadResult result =
      run_load(loop_, server_at(scripted.port()), std::vector<LoadRequest>(1, {.text = "x"}), {});
  const Answer& answer = result.answers[0];
  ASSERT_TRUE(answer.ok()) << answer.error;
  EXPECT_EQ(answer.cached, 16u);
  EXPECT_EQ(answer.loaded, 32u);
  EXPECT_EQ(answer.queued, std::chrono::microseconds(1500));
  EXPECT_EQ(answer.kv_wait, std::chrono::microseconds(2250));
  EXPECT_EQ(answer.kv_error, "slow");
}

TEST_F(Loads, NoRequestsAreNoLoad) {
  const LoadResult result = run_load(loop_, server_at(1), {}, {});
  EXPECT_TRUE(result.answers.empty());
}

}  // namespace
}  // namespace baton::engine::load
