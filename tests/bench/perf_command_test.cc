// The perftest-shaped commands as a user runs them: every test over every provider, and a server
// that outlives its clients.
#include "bench/perftest/perf_plan.h"
#include "bench/report/dialogue.h"
#include "tests/bench/perf_server_fixture.h"
#include "tests/tcp/raw_peer.h"
#include "tests/temporary_folder.h"
#include "tests/test.h"
#include "transport/worker.h"

namespace baton::bench {
namespace {

using testing::HasSubstr;

constexpr const char* kTests[] = {"write_bw",  "read_bw",  "send_bw",
                                  "write_lat", "read_lat", "send_lat"};

void expect_sane(const Json& row, const std::string& test, const std::string& provider) {
  ASSERT_TRUE(row.is_object());
  EXPECT_EQ(row["bench"], test);
  EXPECT_EQ(row["verified"], true);
  EXPECT_THAT(row["route"].get<std::string>(), HasSubstr(provider));
  EXPECT_GT(row["messages_per_s"].get<double>(), 0);
  const Json& latency = row["latency_us"];
  EXPECT_GT(latency["min"].get<double>(), 0);
  EXPECT_LE(latency["min"].get<double>(), latency["p50"].get<double>());
  EXPECT_LE(latency["p50"].get<double>(), latency["p999"].get<double>());
  EXPECT_LE(latency["p999"].get<double>(), latency["max"].get<double>());
  if (test.find("_bw") == std::string::npos) return;
  EXPECT_NEAR(row["GB_per_s"].get<double>() * 1e9,
              row["messages_per_s"].get<double>() * row["bytes"].get<double>(), 1);
  EXPECT_GE(row["GB_per_s_peak"].get<double>() * (1 + 1e-9), row["GB_per_s"].get<double>());
}

class PerfOver : public testing::TestWithParam<const char*> {};

TEST_P(PerfOver, EveryTestIsVerified) {
  const TemporaryFolder folder;
  const std::string path = folder.path("perf.jsonl"), provider = GetParam();
  for (const std::string test : kTests) {
    const bool bandwidth = test.find("_bw") != std::string::npos;
    std::vector<std::string> extras = {
        "-s 1 -n 300", bandwidth ? "-s 5000 -n 300 -b -t 16 -l 4" : "-s 5000 -n 40 -e"};
    if (test.starts_with("write")) extras.emplace_back("--write_with_imm -n 300");
    if (test == "read_bw" || test == "send_lat") extras.emplace_back("-s 512 -D 0.5 -f 0.05");
    for (const std::string& extra : extras) {
      const Ended ended = baton(test + " --loopback --no_pin --provider " + provider + " " + extra +
                                " --json " + path);
      ASSERT_EQ(ended.status, 0) << test << " " << extra << "\n" << ended.output;
      const std::vector<Json> rows = rows_in(path);
      ASSERT_EQ(rows.size(), 1u);
      const size_t count = extra.find("-n ");  // or by time
      if (count == std::string::npos) {
        EXPECT_GT(rows[0]["iterations"].get<uint64_t>(), 0u);
      } else {
        EXPECT_EQ(rows[0]["iterations"], std::stoi(extra.substr(count + 3)));
      }
      expect_sane(rows[0], test, provider);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Perf, PerfOver, testing::Values("shm", "tcp"),
                         [](const auto& provider) { return provider.param; });

TEST(Perf, AllSizesInOneReport) {
  const TemporaryFolder folder;
  const std::string path = folder.path("all.json");
  const Ended ended =
      baton("write_bw -a -n 5 --loopback --no_pin --provider shm --out_json_file " + path);
  ASSERT_EQ(ended.status, 0) << ended.output;
  std::ifstream file(path);
  const Json report = Json::parse(file, nullptr, false);
  ASSERT_TRUE(report.is_object());
  ASSERT_EQ(report["results"].size(), 23u);
  for (size_t i = 0; i < 23; ++i) {
    EXPECT_EQ(report["results"][i]["MsgSize"], size_t{2} << i);
    EXPECT_EQ(report["results"][i]["verified"], true);
  }
}

TEST(Perf, BelowALimitIsAFailure) {
  const Ended ended = baton("write_bw -w 1e9 --loopback --no_pin --provider shm -n 20");
  EXPECT_EQ(ended.status, 1);
  EXPECT_THAT(ended.output, HasSubstr("below the limit"));
}

TEST(Perf, AMissingServerIsReported) {
  const Ended ended = baton("write_bw --provider tcp 127.0.0.1:1");
  EXPECT_EQ(ended.status, 1);
  EXPECT_THAT(ended.output, HasSubstr("127.0.0.1:1"));
}

TEST(Perf, AMissingProviderIsSaidWithTheRemedy) {
  for (const auto& [name, factory] : registered_providers()) {
    if (name == "verbs") GTEST_SKIP() << "verbs is part of this program";
  }
  for (const char* line : {"write_bw --loopback", "write_bw 127.0.0.1:1"}) {
    const Ended ended = baton(line);
    EXPECT_EQ(ended.status, 1);
    EXPECT_THAT(ended.output, HasSubstr("verbs"));
    EXPECT_THAT(ended.output, HasSubstr("--provider tcp"));
  }
}

TEST_F(PerfServer, OutlivesAKilledClientAndServesTheOneWaiting) {
  ChildProcess first = start("write_lat --provider tcp --run_infinitely -D 0.05 " + where_);
  wait_for(first, " #bytes");
  wait_for(first, " 2 ");  // a row: it is in the middle of the next
  ChildProcess second = start("send_bw --provider tcp -n 20 -s 64 " + where_);
  wait_for(second, "busy");
  first.kill();
  const Ended ended = end_of(second);
  EXPECT_EQ(ended.status, 0) << ended.output;
  expect_alive();
}

TEST_F(PerfServer, AClientSaysThatTheServerHasGone) {
  ChildProcess client = start("write_bw --provider tcp --run_infinitely -D 0.05 " + where_);
  wait_for(client, " 65536 ");
  server_.kill();
  const Ended ended = end_of(client);
  EXPECT_EQ(ended.status, 1);
  EXPECT_THAT(ended.output, HasSubstr("baton write_bw: "));
}

TEST_F(PerfServer, OutlivesGarbage) {
  for (const std::string& garbage :
       {std::string(), std::string("GET / HTTP/1.0\r\n\r\n"), std::string(10000, '\xff')}) {
    const int fd = net::dial(where_);
    [[maybe_unused]] const ssize_t put =
        send(fd, garbage.data(), garbage.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    close(fd);
  }
  expect_alive();
}

// An authenticated peer that says what it likes.
TEST_F(PerfServer, AnswersPeersThatSpeakAnotherLanguage) {
  const auto worker = must(Worker::create({.name = "stranger", .providers = {"tcp"}}));
  const auto peer = must(worker->connect(where_));
  const auto answer_to = [&](const std::string& message) {
    EXPECT_TRUE(worker->notify_detached(peer, message).ok());
    Notification answer;
    const absl::Status status = worker->wait_until(
        [&] { return worker->next_notification(answer); }, patient(std::chrono::seconds(30)));
    EXPECT_TRUE(status.ok()) << "no answer to " << message;
    return text_of(parse_message(answer.payload), "error");
  };
  const Json plan = PerfPlan().to_json();
  EXPECT_THAT(answer_to(Json{{"do", "plan"}, {"speaks", 99}, {"plan", plan}}.dump()),
              HasSubstr("same release"));
  EXPECT_THAT(answer_to(R"({"do":"plan"})"), HasSubstr("same release"));
  EXPECT_THAT(answer_to(Json{{"do", "plan"}, {"speaks", kPerfProtocol}, {"plan", 3}}.dump()),
              HasSubstr("JSON object"));
  EXPECT_NE(answer_to(Json{{"do", "plan"}, {"speaks", kPerfProtocol}, {"plan", plan}}.dump()), "");
  EXPECT_THAT(answer_to(R"({"do":"setup"})"), HasSubstr("write_bw"));
  EXPECT_THAT(answer_to(R"({"do":"end","sent":5})"), HasSubstr("plan"));
  // These get no answer, and do no harm.
  for (const char* message : {"{", "\x80\x80", "{\"error\":\"x\"}", "[]"}) {
    EXPECT_TRUE(worker->notify_detached(peer, message).ok());
  }
  expect_alive();
}

TEST_F(PerfServer, TellsAnotherBenchmarkWhatItIs) {
  const Ended ended = client("kv_bw --provider tcp --pages 1 --iters 1");
  EXPECT_EQ(ended.status, 1);
  EXPECT_THAT(ended.output, HasSubstr("this serves baton write_bw"));
  expect_alive();
}

TEST(Perf, AServerOfOneClientEnds) {
  ChildProcess server = start("write_bw --listen 127.0.0.1 -p 0");
  EXPECT_EQ(baton("read_bw --provider tcp -n 10 " + address_of(server)).status, 0);
  const Ended ended = end_of(server);
  EXPECT_EQ(ended.status, 0);
  EXPECT_THAT(ended.output, HasSubstr("client left: read_bw, 1 run\n"));
}

TEST(Perf, APortInUseIsSaid) {
  ChildProcess server = start("write_bw --listen 127.0.0.1 -p 0");
  const std::string where = address_of(server);
  const Ended ended = baton("write_bw --listen 127.0.0.1 -p " + where.substr(where.find(':') + 1));
  EXPECT_EQ(ended.status, 1);
  EXPECT_THAT(ended.output, HasSubstr("in use"));
}

}  // namespace
}  // namespace baton::bench
