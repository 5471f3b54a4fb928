// A server or a router that shuts down: what comes is refused, what is under way goes on, and what
// does not end in time is told so.
#include "absl/strings/match.h"
#include "engine/router/router.h"
#include "tests/routing/fake_worker.h"
#include "tests/routing/routing_fixture.h"
#include "tests/test.h"

namespace baton::engine::serve {
namespace {

void expect_refused(int port) {
  RawClient client(port);
  client.post("/v1/completions", request_body().dump());
  const std::string answer = client.read_to_end();  // its connection is closed, too
  EXPECT_TRUE(absl::StartsWith(answer, "HTTP/1.1 503 ")) << answer;
  EXPECT_TRUE(absl::StrContains(answer, "\r\nRetry-After: ")) << answer;
  EXPECT_TRUE(absl::StrContains(answer, "shutting down")) << answer;
}

void expect_draining(int port) {
  const httplib::Result page = client_of(port).Get("/health");
  EXPECT_EQ(page->status, 503);
  EXPECT_EQ(json::parse(page->body)["draining"], true);
  EXPECT_EQ(client_of(port).Get("/metrics")->status, 200);
}

// The beginning of a stream that is open until somebody ends it.
std::string begin_stream(RawClient& client, int max_tokens) {
  json body = stream_request();
  body["max_tokens"] = max_tokens;
  client.post("/v1/completions", body.dump());
  return client.read_until("\"token_ids\"");
}

TEST(Drain, AServerEndsWhatItHasAndTakesNothingNew) {
  Worker worker(patient_model(), {.blocks = 8192});
  RawClient kept(worker.port()), client(worker.port());
  kept.send("GET /version HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_TRUE(absl::StrContains(kept.read_until("version\""), "keep-alive"));
  begin_stream(client, 1500);
  worker.server().drain();
  until([&] { return client_of(worker.port()).Get("/health")->status == 503; });
  expect_draining(worker.port());
  expect_refused(worker.port());
  kept.send("GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_TRUE(absl::StrContains(kept.read_to_end(), "HTTP/1.1 503"));
  const std::string rest = client.read_until("[DONE]");
  EXPECT_TRUE(absl::StrContains(rest, "\"finish_reason\":\"length\""));
  EXPECT_TRUE(absl::StrContains(rest, "[DONE]"));
  until([&] { return worker.server().drained(); });
}

TEST(Drain, AServerTellsThoseWhoseTimeIsOver) {
  Worker worker(patient_model(), {.blocks = 8192});
  RawClient client(worker.port()), whole(worker.port());
  begin_stream(client, 60000);
  json body = request_body();
  body["max_tokens"] = 60000;
  whole.post("/v1/completions", body.dump());
  until([&] { return worker.thread().stats().running == 2; });
  worker.server().drain();
  EXPECT_FALSE(worker.server().drained());
  worker.server().end_requests();
  const std::string rest = client.read_until("[DONE]");
  EXPECT_TRUE(absl::StrContains(rest, "\"code\":\"engine_stopped\"")) << rest;
  EXPECT_TRUE(absl::StrContains(rest, "shutting down")) << rest;
  EXPECT_TRUE(absl::StrContains(whole.read_until("}}"), "HTTP/1.1 503"));
  until([&] { return worker.server().drained(); });
}

TEST(Drain, ARouterToo) {
  Worker well;
  const std::vector<std::string> events = events_of(well.port());
  for (const bool ends : {true, false}) {
    FakeWorker decode(first(events, 9));
    router::RouterOptions options = options_for({decode.url()});
    const auto router = *router::Router::start(options);
    EXPECT_TRUE(router->drained());
    RawClient client(router->port());
    begin_stream(client, 24);
    router->drain();
    until([&] { return client_of(router->port()).Get("/health")->status == 503; });
    expect_draining(router->port());
    expect_refused(router->port());
    EXPECT_FALSE(router->drained());
    std::string rest;
    for (size_t i = 9; i < events.size(); ++i) rest += events[i];
    ends ? decode.say(rest) : router->end_requests();
    rest = client.read_until("[DONE]");
    EXPECT_TRUE(absl::StrContains(rest, "[DONE]")) << rest;
    EXPECT_EQ(absl::StrContains(rest, "shutting down"), !ends) << rest;
    until([&] { return router->drained(); });
    EXPECT_EQ(decode.asked(), 1);
  }
}

}  // namespace
}  // namespace baton::engine::serve
