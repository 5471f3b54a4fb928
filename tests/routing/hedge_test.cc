// A worker that takes a request and shows nothing: another one is asked as well. The stuck workers
// here never go on by themselves, so without that nothing would end.
#include "engine/http/http_listener.h"
#include "tests/routing/routing_fixture.h"
#include "tests/routing/stuck_worker.h"
#include "tests/test.h"

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
  until([&] { return stuck.asked == 1; });
  // Workers write streams for the router, but this client waits for the last token.
  EXPECT_EQ(stuck.waits_for(), "answer");
  until([&] { return stuck.was_left(); });
  EXPECT_EQ(metric(router->port(), "baton_router_hedges_total"), 1);
  EXPECT_EQ(metric(router->port(), "baton_router_hedges_won_total"), 1);
  EXPECT_EQ(metric(router->port(), "baton_router_retries_total"), 0);
  EXPECT_EQ(of_worker(router->port(), "in_flight", stuck.url()), 0);
  // Who was late gets nothing more for now, though nobody has found it dead.
  for (int i = 0; i < 4; ++i) post_json(router->port(), request_body());
  EXPECT_EQ(stuck.asked, 1);
  EXPECT_EQ(of_worker(router->port(), "worker_up", stuck.url()), 1);
}

TEST(Hedge, ALateWorkerIsUsedAgainOnceItsEngineAdvances) {
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
  until([&] { return slow() == 0; });
  EXPECT_EQ(of_worker(router->port(), "worker_up", stuck.url()), 1);
}

TEST(Hedge, TheFirstWorkerMayStillWin) {
  Worker well;
  const std::vector<std::string> events = events_of(well.port());
  const Streamed want = parse_stream(first(events, events.size()));
  StuckWorker late(first(events, 3)), other;
  const auto router = *router::Router::start(options_for({late.url(), other.url()}));
  Streamed got;
  std::thread client([&] { got = parse_stream(post(router->port(), stream_request())->body); });
  // On a busy machine it may have been asked before the first one was heard, and once more then.
  until([&] { return other.asked > 0 && other.resumed().size() == 3; });
  late.say(behind(events, 3));
  client.join();
  EXPECT_EQ(got.tokens, want.tokens);
  EXPECT_EQ(got.text, want.text);
  until([&] { return other.was_left(); });
  EXPECT_GE(metric(router->port(), "baton_router_hedges_total"), 1);
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
  until([&] { return second.asked == 1; });
  breaks = nullptr;
  until([&] { return of_worker(router->port(), "worker_up", second.url()) == 1; });
  second.say(first(events, events.size()));
  client.join();
  EXPECT_EQ(got.tokens, want.tokens);
  EXPECT_EQ(second.asked, 1);
  EXPECT_EQ(metric(router->port(), "baton_router_retries_total"), 0);
}

// The prefill worker may be what is stuck.
TEST(Hedge, AnotherPrefillWorkerIsAskedIfThereIsOne) {
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
    until([&] { return first_asked.asked == 1 && second.asked == 1; });
    EXPECT_EQ(first_asked.prefill(), "P0");
    EXPECT_EQ(second.prefill(), prefills == 2 ? "P1" : "");
    second.say(first(events, events.size()));
    client.join();
  }
}

// Long before a second has gone by, or ten, since nobody knows yet what is usual.
TEST(StuckWorkers, AWorkerWithoutStatusIsFoundStuck) {
  Worker well;
  const json want = post_json(well.port(), request_body());
  StuckWorker stuck;
  const auto router = *router::Router::start(asking_options_for({stuck.url(), well.url()}));
  stuck.set_deaf(true);
  const auto slow = [&] { return of_worker(router->port(), "worker_slow", stuck.url()); };
  EXPECT_EQ(post_json(router->port(), request_body())["choices"], want["choices"]);
  EXPECT_EQ(metric(router->port(), "baton_router_found_stuck_total"), 1);
  EXPECT_EQ(metric(router->port(), "baton_router_hedges_won_total"), 1);
  until([&] { return stuck.asked == 1; });
  // It gets nothing new, until it answers.
  for (int i = 0; i < 4; ++i) post_json(router->port(), request_body());
  EXPECT_EQ(stuck.asked, 1);
  EXPECT_EQ(slow(), 1);
  stuck.set_deaf(false);
  until([&] { return slow() == 0; });
}

// Promise(serving): A stuck worker costs its requests one hedge; nothing is repeated or lost |
//   another worker continues from the tokens that are here
TEST(StuckWorkers, AStreamGoesOnElsewhereInTheMiddle) {
  Worker well;
  const std::vector<std::string> events = events_of(well.port());
  const Streamed want = parse_stream(first(events, events.size()));
  // It stops in the middle of an event.
  StuckWorker stuck(first(events, 9) + events[9].substr(0, events[9].size() / 2));
  const auto router = *router::Router::start(asking_options_for({stuck.url(), well.url()}));
  stuck.set_deaf(true);
  const Streamed got = parse_stream(post(router->port(), stream_request())->body);
  EXPECT_TRUE(got.done);
  EXPECT_EQ(got.tokens, want.tokens);
  EXPECT_EQ(got.text, want.text);
  EXPECT_EQ(got.finish_reason, want.finish_reason);
  EXPECT_EQ(stuck.waits_for(), "");
  until([&] { return stuck.was_left(); });
  EXPECT_EQ(metric(router->port(), "baton_router_found_stuck_total"), 1);
}

TEST(StuckWorkers, AnEngineThatGetsNowhereIsStuckThoughItsServerAnswers) {
  Worker well;
  StuckWorker stuck;
  const auto router = *router::Router::start(asking_options_for({stuck.url(), well.url()}));
  stuck.quiet = 1;
  post_json(router->port(), request_body());
  until([&] { return stuck.asked == 1; });
  EXPECT_EQ(metric(router->port(), "baton_router_found_stuck_total"), 1);
}

// A machine that stands still as a whole, or is overloaded, must not get more to do.
TEST(StuckWorkers, NoHedgingWhenAllAreStuck) {
  Worker well;
  const std::vector<std::string> events = events_of(well.port());
  StuckWorker one, other;
  const auto router = *router::Router::start(asking_options_for({one.url(), other.url()}));
  const auto found = [&] { return metric(router->port(), "baton_router_found_stuck_total"); };
  one.set_deaf(true);
  other.set_deaf(true);
  std::vector<std::thread> clients;
  // Each worker has one of two requests: the other of who is found stuck first is asked as well.
  for (int i = 0; i < 2; ++i) {
    clients.emplace_back([&] { post(router->port(), stream_request()); });
    until([&] { return one.asked + other.asked > i; });
  }
  until([&] { return found() == 2; });
  const int64_t hedges = metric(router->port(), "baton_router_hedges_total");
  EXPECT_LE(hedges, 1);
  until([&] { return one.asked + other.asked == 2 + hedges; });
  one.set_deaf(false);
  other.set_deaf(false);
  for (StuckWorker* worker : {&one, &other}) worker->say_all(first(events, events.size()));
  for (std::thread& client : clients) client.join();
}

TEST(StuckWorkers, AtMostTenRequestsAreHedged) {
  // Who is well answers at once: many that it computes at a time may show nothing for long.
  StuckWorker well(whole_answer()), stuck;
  const auto router = *router::Router::start(asking_options_for({stuck.url(), well.url()}));
  const auto hedges = [&] { return metric(router->port(), "baton_router_hedges_total"); };
  stuck.set_deaf(true);
  json body = request_body();
  body["n"] = 24;  // in turns, so that either worker has twelve
  std::thread client([&] { EXPECT_EQ(post_json(router->port(), body)["choices"].size(), 24u); });
  until([&] { return hedges() == 10; });
  for (int i = 0; i < 20; ++i) ASSERT_EQ(hedges(), 10);
  until([&] { return stuck.asked >= 12; });
  EXPECT_EQ(stuck.asked, 12);
  stuck.set_deaf(false);
  stuck.say_all(whole_answer());
  client.join();
}

// Decode is well then, and may be asked once more.
TEST(StuckWorkers, APrefillWorkerIsFoundStuck) {
  for (const bool two : {false, true}) {
    http::HttpListener prefill;
    std::vector<Exchange> unheard;
    prefill.route("GET", "/v1/baton/address", [](const Exchange& exchange) {
      exchange->reply(200, "application/json", R"({"address":"P"})");
    });
    prefill.route("GET", "/health",
                  [&unheard](const Exchange& exchange) { unheard.push_back(exchange); });
    ASSERT_TRUE(prefill.listen("127.0.0.1", 0).ok());
    Worker well;
    const std::vector<std::string> events = events_of(well.port());
    const Streamed want = parse_stream(first(events, events.size()));
    StuckWorker decode, other;
    router::RouterOptions options = asking_options_for({decode.url()});
    if (two) options.decode.push_back(other.url());
    options.prefill = {absl::StrCat("http://127.0.0.1:", prefill.port())};
    const auto router = *router::Router::start(options);
    Streamed got;
    std::thread client([&] { got = parse_stream(post(router->port(), stream_request())->body); });
    until([&] { return decode.asked + other.asked == 2; });
    StuckWorker& second = other.asked == 1 ? other : decode;
    EXPECT_EQ(second.prefill(), "");
    const std::string page = metrics_page(router->port());
    EXPECT_EQ(of_worker(page, "worker_slow", options.prefill[0]), 1);
    second.say(first(events, events.size()));
    client.join();
    EXPECT_EQ(got.tokens, want.tokens);
    EXPECT_EQ(of_worker(router->port(), "worker_slow", decode.url()), 0);
    prefill.stop();
  }
}

}  // namespace
}  // namespace baton::engine::serve
