// The log and the environment: levels, wrong values, names that nobody reads, who is refused; and
// nearest names.
#include "transport/base/log.h"

#include "tests/captured_log.h"
#include "tests/manual_clock.h"
#include "tests/test.h"
#include "tests/transport/stub_provider.h"
#include "tests/until.h"
#include "transport/base/environment.h"
#include "transport/base/nearest_name.h"
#include "transport/base/patience.h"

namespace baton {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

TEST(Log, WritesWhatIsWantedAndFormatsNothingElse) {
  const CapturedLog log(base::LogLevel::kInfo);
  base::log_event(base::LogLevel::kDebug, "%s", "too little");
  base::log_event(base::LogLevel::kInfo, "%s has %d", "one", 1);
  base::log_event(base::LogLevel::kError, "%s", "worse");
  EXPECT_THAT(log.lines, ElementsAre("one has 1", "worse"));
  base::set_log_level(base::LogLevel::kOff);
  base::log_event(base::LogLevel::kError, "%s", "unheard");
  EXPECT_FALSE(base::log_wanted(base::LogLevel::kOff)) << "it is no level of a line";
  EXPECT_THAT(log.lines, testing::SizeIs(2));
}

// Whoever writes the first line waits until another thread waits for that, or does not.
class LineUnderWay {
 public:
  explicit LineUnderWay(std::atomic<pid_t>& other) {
    base::set_log_sink([&](base::LogLevel, std::string_view) {
      ++inside_;
      const bool first = !begun.exchange(true);
      while (first && (other == 0 || !sleeps(other)) && !other_is_over && inside_ == 1) {
        std::this_thread::yield();
      }
      together = together || inside_ > 1;
      --inside_;
    });
  }
  ~LineUnderWay() { base::set_log_sink(nullptr); }
  LineUnderWay(const LineUnderWay&) = delete;

  std::atomic<bool> begun{false}, other_is_over{false}, together{false};

 private:
  std::atomic<int> inside_{0};
};

TEST(Log, OneLineIsWrittenAtATime) {
  std::atomic<pid_t> other{0};
  LineUnderWay line(other);
  std::thread writes([&] { base::write_log(base::LogLevel::kError, "a line"); });
  until([&] { return line.begun.load(); });
  std::thread writes_too([&] {
    other = gettid();
    base::write_log(base::LogLevel::kError, "another");
    line.other_is_over = true;
  });
  writes.join();
  writes_too.join();
  EXPECT_FALSE(line.together);
}

// Somebody at the door, as often as the test says.
class RefusingProvider final : public StubProvider {
 public:
  using StubProvider::StubProvider;
  bool progress(EventSink& sink) override {
    for (const absl::Status& why : std::exchange(refusals, {}))
      sink.handshake_refused("tcp x", why);
    return false;
  }
  std::vector<absl::Status> refusals;
};

TEST(Log, RepeatedRefusalsWarnOnceASecond) {
  ManualClock clock;
  std::atomic<int> armed{0};
  RefusingProvider* provider = nullptr;
  const auto worker = *worker_over(provider, armed, {.name = "door", .clock = &clock});
  const CapturedLog log(base::LogLevel::kWarning);
  const auto refuse = [&](const absl::Status& why) {
    provider->refusals = {why};
    worker->progress();
  };
  const absl::Status wrong_key = absl::PermissionDeniedError("the cluster keys differ");
  refuse(absl::UnavailableError("hung up"));
  EXPECT_THAT(log.lines, IsEmpty()) << "a health check";
  refuse(wrong_key);
  clock.advance(std::chrono::milliseconds(999));
  refuse(wrong_key);
  clock.advance(std::chrono::milliseconds(1));
  refuse(wrong_key);
  EXPECT_THAT(
      log.lines,
      ElementsAre("warning: door: refused tcp x: the cluster keys differ (2 refused so far)",
                  "warning: door: refused tcp x: the cluster keys differ (4 refused so far)"));
  EXPECT_EQ(worker->stats().handshakes_refused, 4u);
}

TEST(Log, LevelsHaveNames) {
  EXPECT_EQ(*base::parse_log_level("trace"), base::LogLevel::kTrace);
  EXPECT_EQ(*base::parse_log_level("warning"), base::LogLevel::kWarning);
  EXPECT_EQ(*base::parse_log_level("off"), base::LogLevel::kOff);
  EXPECT_THAT(std::string(base::parse_log_level("inof").status().message()),
              HasSubstr("did you mean info?"));
  EXPECT_TRUE(absl::IsInvalidArgument(base::parse_log_level("").status()));
}

TEST(Environment, UnknownVariablesAreErrors) {
  EXPECT_THAT(base::wrong_environment(), IsEmpty());
  setenv("BATON_KEYFILE", "/key", 1);
  EXPECT_THAT(
      base::wrong_environment(),
      ElementsAre(AllOf(HasSubstr("BATON_KEYFILE"), HasSubstr("did you mean BATON_KEY_FILE?"))));
  setenv("BATON_HOLE", "", 1);
  EXPECT_THAT(base::wrong_environment(),
              ElementsAre(HasSubstr("BATON_HOLE"), HasSubstr("BATON_KEYFILE")))
      << "in their order";
  unsetenv("BATON_HOLE");
  unsetenv("BATON_KEYFILE");
  setenv("BATON_UNHEARD_OF", "", 1);
  EXPECT_THAT(base::wrong_environment(),
              ElementsAre(HasSubstr("env -u BATON_UNHEARD_OF baton info --settings")));
  unsetenv("BATON_UNHEARD_OF");
}

// Services called baton, baton-router and baton-kv-store, as Kubernetes tells of them.
TEST(Environment, WhatAnOrchestratorSetsIsNoMistake) {
  struct Variable {
    const char* name;
    const char* value;
    bool wrong = false;
  };
  constexpr Variable kVariables[] = {
      {"BATON_SERVICE_HOST", "10.96.0.7"},
      {"BATON_SERVICE_PORT", "7000"},
      {"BATON_SERVICE_PORT_HTTP", "8000"},
      {"BATON_PORT", "tcp://10.96.0.7:7000"},
      {"BATON_PORT_7000_TCP", "tcp://10.96.0.7:7000"},
      {"BATON_PORT_7000_TCP_PROTO", "tcp"},
      {"BATON_PORT_7000_TCP_PORT", "7000"},
      {"BATON_PORT_7000_TCP_ADDR", "10.96.0.7"},
      {"BATON_ROUTER_SERVICE_HOST", "fd00::7"},
      {"BATON_ROUTER_SERVICE_PORT", "8000"},
      {"BATON_ROUTER_SERVICE_PORT_METRICS_V2", "9100"},
      {"BATON_ROUTER_PORT", "tcp://[fd00::7]:8000"},
      {"BATON_ROUTER_PORT_8000_TCP_ADDR", "fd00::7"},
      {"BATON_KV_STORE_PORT", "udp://10.96.0.8:53"},
      {"BATON_KV_STORE_PORT_53_UDP", "udp://10.96.0.8:53"},
      {"BATON_KV_STORE_PORT_38412_SCTP_PROTO", "sctp"},
      {"BATON_PORT", "7000", true},  // somebody means to choose a port by it
      {"BATON_HOST", "10.96.0.7", true},
      {"BATON_PORT_TCP", "7000", true},
      {"BATON_PORT_7000_TCP_ADDRESS", "10.96.0.7", true},
      {"BATON_PORT_7000_HTTP", "7000", true},
      {"BATON_X_NAME", "x", true},
  };
  for (const Variable& each : kVariables) {
    SCOPED_TRACE(each.name);
    setenv(each.name, each.value, 1);
    if (each.wrong) {
      EXPECT_THAT(base::wrong_environment(), ElementsAre(HasSubstr(each.name)));
    } else {
      EXPECT_THAT(base::wrong_environment(), IsEmpty());
    }
    unsetenv(each.name);
  }
}

TEST(Environment, PatienceIsAFactor) {
  EXPECT_EQ(*base::parse_patience(""), 1);
  EXPECT_EQ(*base::parse_patience("1"), 1);
  EXPECT_EQ(*base::parse_patience("1000"), 1000);
  for (const char* wrong : {"0", "-3", "1001", "1.5", "long", "10 s", "99999999999"}) {
    EXPECT_THAT(std::string(base::parse_patience(wrong).status().message()),
                AllOf(HasSubstr(wrong), HasSubstr("from 1 to 1000")));
  }
}

TEST(NearestName, CountsEditsAndSwaps) {
  const std::vector<std::string> known = {"tcp.sockets", "tcp.slice_kib", "shm.cma"};
  EXPECT_EQ(base::nearest_name("tcp.sokets", known), "tcp.sockets");
  EXPECT_EQ(base::nearest_name("tpc.scokets", known), "tcp.sockets");
  EXPECT_EQ(base::nearest_name("tcp.slicekib", known), "tcp.slice_kib");
  EXPECT_EQ(base::nearest_name("shm.cm", known), "shm.cma");
  EXPECT_EQ(base::nearest_name("frobnicate", known), std::nullopt);
  EXPECT_EQ(base::nearest_name("tcp", {}), std::nullopt);
  EXPECT_EQ(base::nearest_name("tpc", {"ucx", "tcp"}), "tcp");
  EXPECT_EQ(base::did_you_mean("tcp.sokets", known), "; did you mean tcp.sockets?");
  EXPECT_EQ(base::did_you_mean("frobnicate", known), "");
}

}  // namespace
}  // namespace baton
