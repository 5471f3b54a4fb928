// A worker that takes a request and shows nothing: another one is asked as well. The stuck workers
// here never go on by themselves, so without that nothing would end.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "engine/http/http_listener.h"
#include "tests/routing/routing_fixture.h"
#include "tests/routing/stuck_worker.h"

namespace baton::engine::serve {
namespace {

using std::chrono::milliseconds;

TEST(Hedge, ARequestThatShowsNothingIsAskedOfAnotherWorker) {
  Worker well;
  const json want = post_json(well.port(), request_body());
  StuckWorker stuck;
  const auto router = *router::Router::start(options_for({stuck.url(), well.url()}));
  const json got = post_json(router->port(), request_body());
  EXPECT_EQ(got["choices"], want["choices"]);
  EXPECT_EQ(stuck.asked, 1);
  wait_until([&] { return stuck.was_left(); });
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
  wait_until([&] { return stuck.was_left(); });
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
  wait_until([&] { return other.was_left(); });
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
