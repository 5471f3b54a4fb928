// Workers that join and leave: the file that lists them, and what a router makes of it.
#include "engine/router/workers.h"
#include "tests/captured_log.h"
#include "tests/routing/fake_worker.h"
#include "tests/routing/routing_fixture.h"
#include "tests/temporary_folder.h"
#include "tests/test.h"

namespace baton::engine::serve {
namespace {

TEST(WorkerList, SaysRolesAndAddresses) {
  const auto listed = must(router::parse_worker_list(
      "# ours\n\n  prefill http://10.0.0.1:8001\r\ndecode\thttp://[::1]:8002 # the quick one\n"
      "decode http://h/\n"));
  ASSERT_EQ(listed.prefill.size(), 1u);
  EXPECT_EQ(listed.prefill[0].text(), "http://10.0.0.1:8001");
  ASSERT_EQ(listed.decode.size(), 2u);
  EXPECT_EQ(listed.decode[0].text(), "http://[::1]:8002");
  EXPECT_EQ(listed.decode[1].text(), "http://h:80");
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
      {"decode http://h:1 http://h:2\n",
       "line 1: nothing may stand behind the URL: remove http://h:2"},
      {"decode ftp://h:1\n", "ftp://h:1"},
      {"decode http://h:1\n\nprefill http://h:1\n", "line 3: http://h:1 is listed already"},
  };
  for (const auto& bad : cases) {
    const absl::Status status = router::parse_worker_list(bad.text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad.text;
    EXPECT_NE(status.message().find(bad.reason), absl::string_view::npos) << status;
  }
}

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
  Worker first, second;
  CapturedLog log(base::LogLevel::kWarning);
  write_list(folder, absl::StrCat("decode ", first.url(), "\n"));
  const auto router = *router::Router::start(by_list(folder));
  const auto of = [&](const char* name, const Worker& worker) {
    return of_worker(router->port(), name, worker.url());
  };
  post_json(router->port(), request_body());
  EXPECT_EQ(first.thread().stats().requests_finished, 1u);
  EXPECT_EQ(of("worker_up", second), -1);
  write_list(folder, absl::StrCat("decode ", first.url(), "\ndecode ", second.url(), "\n"));
  until([&] { return of("worker_up", second) == 1; });
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

TEST(RoutingList, ADepartingWorkerEndsItsRequests) {
  TemporaryFolder folder;
  Worker staying;
  const std::vector<std::string> events = events_of(staying.port());
  FakeWorker leaving(first(events, 9));
  write_list(folder, absl::StrCat("decode ", leaving.url(), "\n"));
  const auto router = *router::Router::start(by_list(folder));
  RawClient client(router->port());
  client.post("/v1/completions", stream_request().dump());
  client.read_until("\"token_ids\"");
  write_list(folder, absl::StrCat("decode ", staying.url(), "\n"));
  httplib::Client http("127.0.0.1", router->port());
  until([&] {
    const httplib::Result page = http.Get("/health");
    return page && page->body.find("\"draining\":true") != std::string::npos;
  });
  until([&] { return of_worker(router->port(), "worker_up", staying.url()) == 1; });
  post_json(router->port(), request_body());  // by the other
  leaving.say(behind(events, 9));
  const std::string rest = client.read_until("[DONE]");
  EXPECT_NE(rest.find(R"("finish_reason":"length")"), std::string::npos) << rest;
  until([&] { return of_worker(router->port(), "in_flight", leaving.url()) == -1; });
  EXPECT_EQ(metric(router->port(), "baton_router_retries_total"), 0);
}

}  // namespace
}  // namespace baton::engine::serve
