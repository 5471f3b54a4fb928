// A worker that takes a request and shows nothing: another one is asked as well. The stuck workers
// here never go on by themselves, so without that nothing would end.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/http/http_listener.h"
#include "tests/routing/routing_fixture.h"

namespace baton::engine::serve {
namespace {

using std::chrono::milliseconds;
using Exchange = std::shared_ptr<http::HttpExchange>;

// Says that it is well, and of what it is asked only as much as the test says.
class StuckWorker {
 public:
  explicit StuckWorker(std::string says = "") : says_(std::move(says)) {
    listener_.route("GET", "/health", [this](const Exchange& exchange) {
      exchange->reply(200, "application/json", absl::StrCat("{\"quiet_s\":", quiet.load(), "}"));
    });
    listener_.route("POST", "/v1/completions", [this](const Exchange& exchange) {
      exchange->on_gone([this] { ++left; });
      const std::lock_guard lock(mutex_);
      bodies_.push_back(json::parse(exchange->request().body));
      exchange->begin(200, "text/event-stream");
      if (!says_.empty()) exchange->write(says_);
      exchanges_.push_back(exchange);
      ++asked;
    });
    EXPECT_TRUE(listener_.listen("127.0.0.1", 0).ok());
  }
  ~StuckWorker() { listener_.stop(); }
  std::string url() const { return absl::StrCat("http://127.0.0.1:", listener_.port()); }
  // It goes on with what it was asked last.
  void say(const std::string& bytes) {
    const std::lock_guard lock(mutex_);
    exchanges_.back()->write(bytes);
    exchanges_.back()->end();
  }
  // What it was told of where the KV is, last.
  std::string prefill() {
    const std::lock_guard lock(mutex_);
    return bodies_.back()["kv_transfer_params"]["prefill"];
  }
  std::vector<int32_t> resumed() {
    const std::lock_guard lock(mutex_);
    return bodies_.back()["kv_transfer_params"]["resume_token_ids"];
  }

  std::atomic<int> quiet{0};  // seconds: what it says of its engine
  std::atomic<int> asked{0};
  std::atomic<int> left{0};  // whoever asked has hung up

 private:
  http::HttpListener listener_;
  std::mutex mutex_;
  const std::string says_;
  std::vector<Exchange> exchanges_;
  std::vector<json> bodies_;
};

// Nobody is looked after between two tests' events: only hedges help.
router::RouterOptions options_for(std::vector<std::string> decode) {
  router::RouterOptions options{.port = 0, .decode = std::move(decode)};
  options.hedge_after = milliseconds(5);
  options.health_interval = std::chrono::hours(1);
  return options;
}

json stream_request() {
  json body = request_body();
  body["stream"] = true;
  body["stream_options"] = {{"include_usage", true}};
  return body;
}

// The events of a whole answer, each with its end.
std::vector<std::string> events_of(int port) {
  const std::string bytes = post(port, stream_request())->body;
  std::vector<std::string> events;
  for (size_t at = 0, end; (end = bytes.find("\n\n", at)) != std::string::npos; at = end + 2) {
    events.push_back(bytes.substr(at, end + 2 - at));
  }
  return events;
}

std::string first(const std::vector<std::string>& events, size_t count) {
  std::string bytes;
  for (size_t i = 0; i < count; ++i) bytes += events[i];
  return bytes;
}

TEST(Hedge, ARequestThatShowsNothingIsAskedOfAnotherWorker) {
  Worker well;
  const json want = post_json(well.port(), request_body());
  StuckWorker stuck;
  const auto router = *router::Router::start(options_for({stuck.url(), well.url()}));
  const json got = post_json(router->port(), request_body());
  EXPECT_EQ(got["choices"], want["choices"]);
  EXPECT_EQ(stuck.asked, 1);
  wait_until([&] { return stuck.left == 1; });
  EXPECT_EQ(metric(router->port(), "baton_router_hedges_total"), 1);
  EXPECT_EQ(metric(router->port(), "baton_router_hedges_won_total"), 1);
  EXPECT_EQ(metric(router->port(), "baton_router_retries_total"), 0);
  EXPECT_EQ(of_worker(router->port(), "in_flight", stuck.url()), 0);
  // Who was late gets nothing more for now, though nobody has found it dead.
  for (int i = 0; i < 4; ++i) post_json(router->port(), request_body());
  EXPECT_EQ(stuck.asked, 1);
  EXPECT_EQ(of_worker(router->port(), "worker_up", stuck.url()), 1);
}

TEST(Hedge, WhoWasLateIsAskedAgainWhenItsEngineGetsOn) {
  Worker well;
  StuckWorker stuck;
  stuck.quiet = 5;
  router::RouterOptions options = options_for({stuck.url(), well.url()});
  options.health_interval = milliseconds(5);
  const auto router = *router::Router::start(options);
  post_json(router->port(), request_body());
  const auto slow = [&] { return of_worker(router->port(), "worker_slow", stuck.url()); };
  EXPECT_EQ(slow(), 1);
  stuck.quiet = 0;
  wait_until([&] { return slow() == 0; });
  EXPECT_EQ(of_worker(router->port(), "worker_up", stuck.url()), 1);
}

TEST(Hedge, AStreamThatStopsGoesOnElsewhere) {
  Worker well;
  const std::vector<std::string> events = events_of(well.port());
  ASSERT_GT(events.size(), 12u);
  std::string whole = first(events, events.size());
  const Streamed want = parse_stream(whole);
  // It stops in the middle of an event.
  StuckWorker stuck(first(events, 9) + events[9].substr(0, events[9].size() / 2));
  const auto router = *router::Router::start(options_for({stuck.url(), well.url()}));
  const Streamed got = parse_stream(post(router->port(), stream_request())->body);
  EXPECT_TRUE(got.done);
  EXPECT_EQ(got.tokens, want.tokens);
  EXPECT_EQ(got.text, want.text);
  EXPECT_EQ(got.finish_reason, want.finish_reason);
  wait_until([&] { return stuck.left == 1; });
  EXPECT_EQ(metric(router->port(), "baton_router_hedges_won_total"), 1);
}

TEST(Hedge, WhoWasAskedFirstMayStillBeFirst) {
  Worker well;
  const std::vector<std::string> events = events_of(well.port());
  const Streamed want = parse_stream(first(events, events.size()));
  StuckWorker late(first(events, 3)), other;
  const auto router = *router::Router::start(options_for({late.url(), other.url()}));
  Streamed got;
  std::thread client([&] { got = parse_stream(post(router->port(), stream_request())->body); });
  wait_until([&] { return other.asked == 1; });
  EXPECT_EQ(other.resumed().size(), 3u);
  std::string rest;
  for (size_t i = 3; i < events.size(); ++i) rest += events[i];
  late.say(rest);
  client.join();
  EXPECT_EQ(got.tokens, want.tokens);
  EXPECT_EQ(got.text, want.text);
  wait_until([&] { return other.left == 1; });
  EXPECT_EQ(late.left, 0);
  EXPECT_EQ(metric(router->port(), "baton_router_hedges_total"), 1);
  EXPECT_EQ(metric(router->port(), "baton_router_hedges_won_total"), 0);
}

TEST(Hedge, WhereTheFirstBreaksOffTheSecondGoesOn) {
  Worker well;
  const std::vector<std::string> events = events_of(well.port());
  const Streamed want = parse_stream(first(events, events.size()));
  StuckWorker second;
  auto breaks = std::make_unique<StuckWorker>();
  const auto router = *router::Router::start(options_for({breaks->url(), second.url()}));
  Streamed got;
  std::thread client([&] { got = parse_stream(post(router->port(), stream_request())->body); });
  wait_until([&] { return second.asked == 1; });
  breaks = nullptr;
  wait_until([&] { return of_worker(router->port(), "worker_up", second.url()) == 1; });
  second.say(first(events, events.size()));
  client.join();
  EXPECT_EQ(got.tokens, want.tokens);
  EXPECT_EQ(second.asked, 1);
  EXPECT_EQ(metric(router->port(), "baton_router_retries_total"), 0);
}

// The prefill worker may be what is stuck.
TEST(Hedge, AnotherPrefillWorkerIsAskedOrNone) {
  for (const size_t prefills : {2, 1}) {
    std::vector<std::unique_ptr<http::HttpListener>> listeners;
    router::RouterOptions options = options_for({});
    for (size_t i = 0; i < prefills; ++i) {
      listeners.push_back(std::make_unique<http::HttpListener>());
      listeners.back()->route("GET", "/v1/baton/address", [i](const Exchange& exchange) {
        exchange->reply(200, "application/json", absl::StrCat("{\"address\":\"P", i, "\"}"));
      });
      ASSERT_TRUE(listeners.back()->listen("127.0.0.1", 0).ok());
      options.prefill.push_back(absl::StrCat("http://127.0.0.1:", listeners.back()->port()));
    }
    Worker well;
    const std::vector<std::string> events = events_of(well.port());
    StuckWorker first_asked, second;
    options.decode = {first_asked.url(), second.url()};
    const auto router = *router::Router::start(options);
    std::thread client([&] { post(router->port(), stream_request()); });
    wait_until([&] { return second.asked == 1; });
    EXPECT_EQ(first_asked.prefill(), "P0");
    EXPECT_EQ(second.prefill(), prefills == 2 ? "P1" : "");
    second.say(first(events, events.size()));
    client.join();
  }
}

}  // namespace
}  // namespace baton::engine::serve
