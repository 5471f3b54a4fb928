// A decode worker dies: what it was asked goes on elsewhere, however much that is, or waits for it
// to come back; and what the log says of it.
#include "tests/captured_log.h"
#include "tests/routing/fake_worker.h"
#include "tests/routing/routing_fixture.h"
#include "tests/test.h"

namespace baton::engine::serve {
namespace {

using std::chrono::milliseconds;
using testing::ElementsAre;
using testing::HasSubstr;

// More than the retry budget has from the start, and than so few requests earn.
constexpr int kChoices = 60;

TEST(LostWorker, AllThatItWasAskedGoesOnElsewhere) {
  Worker well;
  json body = request_body();
  body["n"] = kChoices;
  const json want = post_json(well.port(), body)["choices"];
  auto dies = std::make_unique<FakeWorker>();
  const auto router = *router::Router::start(options_for({dies->url(), well.url()}));
  json got;
  std::thread client([&] { got = post_json(router->port(), body)["choices"]; });
  until([&] { return dies->asked() == kChoices / 2; });
  dies = nullptr;
  client.join();
  EXPECT_EQ(got, want);
  EXPECT_EQ(metric(router->port(), "baton_router_retries_total"), kChoices / 2);
}

// The other worker is started once all streams have begun: until then none can go to it.
TEST(LostWorker, StreamsThatHaveBegunGoOnElsewhere) {
  auto well = std::make_unique<Worker>();
  const int port = well->port();
  const std::string url = well->url();
  const std::vector<std::string> events = events_of(port);
  const Streamed want = parse_stream(first(events, events.size()));
  well = nullptr;
  auto dies = std::make_unique<FakeWorker>(first(events, 9));
  router::RouterOptions options = options_for({dies->url(), url});
  options.health_interval = milliseconds(20);
  const auto router = *router::Router::start(options);
  EXPECT_EQ(of_worker(router->port(), "worker_up", url), 0);
  std::vector<Streamed> got(kChoices);
  std::vector<std::thread> clients;
  for (Streamed& one : got) {
    clients.emplace_back([&] { one = parse_stream(post(router->port(), stream_request())->body); });
  }
  until([&] { return dies->asked() == kChoices; });
  well = std::make_unique<Worker>(test_model(), EngineOptions{.blocks = 256},
                                  http::HttpServerOptions{.port = port});
  until([&] { return of_worker(router->port(), "worker_up", url) == 1; });
  dies = nullptr;
  for (std::thread& client : clients) client.join();
  for (const Streamed& one : got) {
    EXPECT_TRUE(one.done);
    EXPECT_EQ(one.tokens, want.tokens);
    EXPECT_EQ(one.text, want.text);
  }
}

// Promise(serving): Requests of a worker that stands still go on elsewhere; nothing is repeated or
//   lost | it misses two probes, and another worker continues from the tokens that are here
TEST(LostWorker, WhatOneThatStandsStillWasAskedGoesOnElsewhere) {
  Worker well;
  const std::vector<std::string> events = events_of(well.port());
  const Streamed want = parse_stream(first(events, events.size()));
  const json whole = post_json(well.port(), request_body())["choices"];
  for (const bool stream : {true, false}) {
    // It stops in the middle of an event.
    FakeWorker stuck(first(events, 9) + events[9].substr(0, events[9].size() / 2));
    router::RouterOptions options = options_for({stuck.url(), well.url()});
    options.health_interval = milliseconds(20);
    options.health_timeout = patient(milliseconds(500));
    options.comeback = std::chrono::hours(1);
    const auto router = *router::Router::start(options);
    std::string body;
    std::thread client(
        [&] { body = post(router->port(), stream ? stream_request() : request_body())->body; });
    until([&] { return stuck.asked() == 1; });
    stuck.set_deaf(true);
    client.join();
    if (stream) {
      const Streamed got = parse_stream(body);
      EXPECT_TRUE(got.done);
      EXPECT_EQ(got.tokens, want.tokens);
      EXPECT_EQ(got.text, want.text);
      EXPECT_EQ(got.finish_reason, want.finish_reason);
    } else {
      EXPECT_EQ(json::parse(body)["choices"], whole);
      EXPECT_EQ(json::parse(body)["usage"]["completion_tokens"], 24);
    }
    EXPECT_EQ(stuck.asked(), 1);
    // Workers write streams for the router, whatever its client waits for.
    EXPECT_EQ(stuck.waits_for(), stream ? "" : "answer");
    until([&] { return stuck.was_left(); });
    // It gets nothing new, until it answers.
    for (int i = 0; i < 4; ++i) post_json(router->port(), request_body());
    EXPECT_EQ(stuck.asked(), 1);
    stuck.set_deaf(false);
    until([&] { return of_worker(router->port(), "worker_up", stuck.url()) == 1; });
  }
}

// Where none is up, one that is down is asked; but not waited for if it still shows nothing.
TEST(LostWorker, WhatOneThatIsDownWasAskedIsNotLeftThere) {
  FakeWorker stuck;
  router::RouterOptions options = options_for({stuck.url()});
  options.health_interval = milliseconds(20);
  options.health_timeout = patient(milliseconds(100));
  const auto router = *router::Router::start(options);
  stuck.set_deaf(true);
  until([&] { return of_worker(router->port(), "worker_up", stuck.url()) == 0; });
  const httplib::Result result = post(router->port(), request_body());
  ASSERT_TRUE(result);
  EXPECT_EQ(stuck.asked(), 1);
  EXPECT_EQ(result->status, 503);
  EXPECT_THAT(result->body, HasSubstr("no decode worker is left that can continue"));
  stuck.set_deaf(false);
}

TEST(LostWorker, ARequestWithoutASeedGoesOnWithTheSameOne) {
  auto dies = std::make_unique<FakeWorker>();
  FakeWorker other(whole_answer());
  const auto router = *router::Router::start(options_for({dies->url(), other.url()}));
  json body = request_body();
  body.erase("seed");
  std::thread client([&] { post_json(router->port(), body); });
  until([&] { return dies->asked() == 1; });
  const json seed = dies->questions()[0]["seed"];
  EXPECT_TRUE(seed.is_number());
  dies = nullptr;
  client.join();
  EXPECT_EQ(other.questions()[0]["seed"], seed);
}

// What a worker answers with an error may be the request's fault: that has a budget.
TEST(LostWorker, ErrorsThatAWorkerAnswersArePaidFor) {
  const std::string broken = "data: {\"error\":{\"message\":\"no\",\"type\":\"server_error\"}}\n\n";
  FakeWorker one(broken), other(broken);
  router::RouterOptions options = options_for({one.url(), other.url()});
  options.max_retries = 1000;
  const auto router = *router::Router::start(options);
  const httplib::Result result = post(router->port(), request_body());
  EXPECT_EQ(result->status, 503);
  EXPECT_THAT(result->body, HasSubstr("too much is being retried already"));
  EXPECT_EQ(metric(router->port(), "baton_router_retries_total"), 10);
}

TEST(LostWorker, GarbageIsItsOwnFaultAndAnotherOneIsAsked) {
  Worker well;
  const std::vector<std::string> events = events_of(well.port());
  const json want = post_json(well.port(), request_body())["choices"];
  for (const auto& [status, sent, error] :
       {std::tuple(200, "data: x\n\n", "a worker's event is not valid JSON"),
        std::tuple(200, "data: 1\n\n", "an event that is not OpenAI's"),
        std::tuple(301, "", "HTTP status 301"), std::tuple(999, "{}", "HTTP status 999")}) {
    FakeWorker broken;
    broken.answer(status, sent);
    const auto alone = *router::Router::start(options_for({broken.url()}));
    const httplib::Result result = post(alone->port(), stream_request());
    EXPECT_EQ(result->status, 502);
    EXPECT_THAT(result->body, AllOf(HasSubstr(error), HasSubstr("server_error")));
    const auto both = *router::Router::start(options_for({broken.url(), well.url()}));
    EXPECT_EQ(post_json(both->port(), request_body())["choices"], want);
    EXPECT_EQ(broken.asked(), 5);  // retries, and once more
  }
  FakeWorker breaks(first(events, 9) + "data: x\n\n");
  const auto both = *router::Router::start(options_for({breaks.url(), well.url()}));
  const Streamed got = parse_stream(post(both->port(), stream_request())->body);
  EXPECT_EQ(got.tokens, parse_stream(first(events, events.size())).tokens);
  EXPECT_EQ(breaks.asked(), 1);
}

TEST(LostWorker, OneThatHasAnsweredOverHttpIsNotTakenForOneOfTls) {
  auto dies = std::make_unique<FakeWorker>();
  const auto router = *router::Router::start(options_for({dies->url()}));
  std::string body;
  std::thread client([&] { body = post(router->port(), request_body())->body; });
  until([&] { return dies->asked() == 1; });
  dies = nullptr;
  client.join();
  EXPECT_THAT(body, HasSubstr("it closed the connection without an answer\""));
}

TEST(LostWorker, TheOnlyOneIsWaitedFor) {
  Worker well;
  const std::vector<std::string> events = events_of(well.port());
  const Streamed want = parse_stream(first(events, events.size()));
  for (const std::string& begun : {std::string(), first(events, 9)}) {
    CapturedLog log(base::LogLevel::kWarning);
    auto dies = std::make_unique<FakeWorker>(begun);
    router::RouterOptions options = options_for({dies->url()});
    options.health_interval = milliseconds(20);
    options.comeback = std::chrono::hours(1);
    auto router = *router::Router::start(options);
    Streamed got;
    std::thread client([&] { got = parse_stream(post(router->port(), stream_request())->body); });
    until([&] { return dies->asked() == 1; });
    const int port = dies->port();
    dies = nullptr;
    until([&] { return of_worker(router->port(), "worker_up", options.decode[0]) == 0; });
    Worker back(test_model(), {.blocks = 256}, {.port = port});
    client.join();
    EXPECT_EQ(got.tokens, want.tokens);
    EXPECT_EQ(got.text, want.text);
    router = nullptr;
    // The recovery as loudly as the loss.
    EXPECT_THAT(
        log.lines,
        ElementsAre(
            HasSubstr("warning: router: decode worker " + options.decode[0] + " is not used: "),
            HasSubstr("warning: router: decode worker " + options.decode[0] + " is used again")));
  }
}

TEST(LostWorker, ServersThatStartTogetherAreNoLosses) {
  CapturedLog log(base::LogLevel::kWarning);
  router::RouterOptions options = options_for({"http://127.0.0.1:1"});
  auto router = *router::Router::start(options);
  EXPECT_EQ(of_worker(router->port(), "worker_up", options.decode[0]), 0);
  router = nullptr;
  EXPECT_THAT(log.lines, testing::IsEmpty());
  // One that never answers is told of in the end, and once.
  options.health_interval = milliseconds(1);
  router = *router::Router::start(options);
  until([&] {
    return json::parse(client_of(router->port()).Get("/health")->body)["workers"][0]["looks"] > 20;
  });
  router = nullptr;
  EXPECT_THAT(log.lines, ElementsAre(HasSubstr("is not used: ")));
}

// A worker that shuts down in order keeps what it has and gets nothing new.
TEST(LostWorker, OneThatDrainsKeepsItsRequests) {
  Worker well;
  const std::vector<std::string> events = events_of(well.port());
  const Streamed want = parse_stream(first(events, events.size()));
  FakeWorker leaves(first(events, 9));
  router::RouterOptions options = options_for({leaves.url(), well.url()});
  options.health_interval = milliseconds(5);
  const auto router = *router::Router::start(options);
  Streamed got;
  std::thread client([&] { got = parse_stream(post(router->port(), stream_request())->body); });
  until([&] { return leaves.asked() == 1; });
  leaves.draining = true;
  until([&] { return of_worker(router->port(), "worker_up", leaves.url()) == 0; });
  for (int i = 0; i < 4; ++i) post_json(router->port(), request_body());
  EXPECT_EQ(leaves.asked(), 1);
  leaves.say(behind(events, 9));
  client.join();
  EXPECT_EQ(got.tokens, want.tokens);
  EXPECT_EQ(metric(router->port(), "baton_router_retries_total"), 0);
}

// Whatever a worker that shuts down refuses is asked of another, and no budget is spent for it.
TEST(LostWorker, WhatADrainingOneRefusesGoesElsewhere) {
  Worker leaves, well;
  const auto router = *router::Router::start(options_for({leaves.url(), well.url()}));
  leaves.server().drain();
  until([&] { return client_of(leaves.port()).Get("/health")->status == 503; });
  json body = request_body();
  body["n"] = kChoices;
  EXPECT_EQ(post_json(router->port(), body)["choices"].size(), size_t{kChoices});
  EXPECT_EQ(of_worker(router->port(), "worker_up", leaves.url()), 0);
}

}  // namespace
}  // namespace baton::engine::serve
