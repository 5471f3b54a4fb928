// How soon a fault is noticed, in virtual time and with the settings that people get by default;
// how work is shared among rails, and when a lost one returns.
#include "tests/verbs/verbs_pair.h"
#include "verbs/device/tuning.h"

namespace baton {
namespace {

using std::chrono::milliseconds;
using testing::AnyOf;
using testing::HasSubstr;

// What the issue of a fault may take beyond what the settings predict.
constexpr Time kGrace = milliseconds(200);

struct Fault {
  const char* name;
  std::function<void(FakeVerbs&, size_t device)> strike;
  const char* message;
};

std::vector<Fault> faults() {
  return {
      {"PortDown", [](FakeVerbs& f, size_t d) { f.set_port(d, false); }, "went down"},
      {"Cable", [](FakeVerbs& f, size_t d) { f.set_cable(d, false); }, "did not answer"},
      {"Hanging", [](FakeVerbs& f, size_t d) { f.set_hanging(d, true); }, "has been pending"},
      {"DeviceFatal", [](FakeVerbs& f, size_t d) { f.kill(d); }, "went down"},
      {"QueuePairFatal", [](FakeVerbs& f, size_t d) { f.break_queue_pairs(d); }, "event"},
      {"ReceivesGone", [](FakeVerbs& f, size_t d) { f.take_receives(d); }, "no receive posted"},
  };
}

// What the settings predict; no sooner than `least`. A rail that another one can replace is given
// up soon, the only one late.
struct Prediction {
  Time most{};
  Time least{};
};
Prediction prediction(const std::string& fault, bool redundant) {
  const verbs::Tuning defaults = verbs::Tuning().for_session(redundant);
  // A queue pair that does not drain is waited for so long, at either end.
  const Time draining = defaults.settle / 4;
  if (fault == "PortDown" && !redundant) return {defaults.port_grace, defaults.port_grace};
  if (fault == "Cable") return {defaults.detection(), defaults.detection() - milliseconds(10)};
  if (fault == "Hanging") return {defaults.stall + 2 * draining, defaults.stall - milliseconds(10)};
  if (fault == "DeviceFatal") return {draining, Time(0)};
  if (fault == "ReceivesGone") return {2 * draining, Time(0)};
  return {};
}

class Detection : public testing::TestWithParam<Fault> {};

TEST_P(Detection, TheLastRailEndsEveryTransferInTime) {
  const Fault& fault = GetParam();
  VerbsPair pair({.devices = 1});
  pair.tick = std::chrono::microseconds(250);
  pair.connect();
  const CounterId counter = *pair.b.worker->allocate_counter();
  std::vector<TransferId> ids;
  // A read takes no receive, and ends well without them.
  const bool reads = std::string(fault.name) != "ReceivesGone";
  if (reads) ids.push_back(*pair.a.worker->submit(pair.request(Op::kRead)));
  for (int i = 0; i < 20; ++i) {
    TransferRequest one = pair.request(Op::kWrite, 1 << 20);
    one.counter = pair.b.worker->remote_counter(counter);
    ids.push_back(*pair.a.worker->submit(one));
  }
  pair.steps(4);
  pair.expect_ready = false;
  const Time struck = pair.clock.now();
  fault.strike(*pair.fake, 0);
  for (TransferId id : ids) {
    const absl::Status status = pair.finish(id);
    // The connection goes with its last rail; what was under way fails, with a reason.
    EXPECT_FALSE(status.ok());
    EXPECT_THAT(std::string(status.message()),
                AnyOf(HasSubstr(fault.message), HasSubstr("the peer closed"),
                      HasSubstr("peer's end"), HasSubstr("not known whether")));
  }
  const Time took = pair.clock.now() - struck;
  EXPECT_LE(took, prediction(fault.name, false).most + kGrace);
  EXPECT_GE(took, prediction(fault.name, false).least);
  RecordProperty("ms", static_cast<int>(took / milliseconds(1)));
  pair.until([&] {
    return pair.a.worker->peer_state(pair.a.peer) == PeerState::kDown &&
           pair.b.worker->peer_state(pair.b.peer) == PeerState::kDown;
  });
  EXPECT_EQ(pair.a.worker->stats().open_transfers, 0u);
}

TEST_P(Detection, AnotherRailTakesTheWorkOverInTime) {
  const Fault& fault = GetParam();
  VerbsPair pair({.devices = 2});
  pair.tick = std::chrono::microseconds(250);
  pair.connect();
  pair.fill(5);
  const CounterId counter = *pair.b.worker->allocate_counter();
  TransferRequest request = pair.request(Op::kWrite);
  request.counter = pair.b.worker->remote_counter(counter);
  const TransferId id = *pair.a.worker->submit(request);
  pair.steps(4);
  pair.expect_ready = false;
  const Time struck = pair.clock.now();
  const FakeStats before = pair.fake->stats();
  fault.strike(*pair.fake, 1);
  const absl::Status status = pair.finish(id);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_LE(pair.clock.now() - struck, prediction(fault.name, true).most + kGrace);
  EXPECT_TRUE(pair.a.memory == pair.b.memory);
  pair.steps(100);
  EXPECT_EQ(pair.b.worker->counter_value(counter), 1u) << "exactly once, whichever rail carried it";
  if (std::string(fault.name) != "Hanging" && std::string(fault.name) != "DeviceFatal") {
    EXPECT_GT(pair.fake->stats().flushed, before.flushed) << "drained through the error state";
  }
  EXPECT_EQ(pair.a.worker->peer_state(pair.a.peer), PeerState::kUp);
}

INSTANTIATE_TEST_SUITE_P(Faults, Detection, testing::ValuesIn(faults()),
                         [](const auto& fault) { return std::string(fault.param.name); });

TEST(Settings, ARailThatAnotherCanReplaceIsGivenUpSooner) {
  const verbs::Tuning defaults;
  EXPECT_EQ(defaults.for_session(true).detection() / milliseconds(1), 469);
  EXPECT_EQ(defaults.for_session(false).detection() / milliseconds(1), 7516);
  verbs::Tuning given;
  given.timeout = 10;
  EXPECT_EQ(given.for_session(true).timeout, 10);
  EXPECT_EQ(given.for_session(false).timeout, 10);
}

// The part of `bytes` that each device began since `before`.
std::vector<double> shares(VerbsPair& pair, size_t devices) {
  std::vector<uint64_t> before;
  for (size_t i = 0; i < devices; ++i) before.push_back(pair.fake->moved(i));
  EXPECT_TRUE(pair.run(pair.request(Op::kWrite)).ok());
  std::vector<double> out;
  for (size_t i = 0; i < devices; ++i) {
    out.push_back(static_cast<double>(pair.fake->moved(i) - before[i]) / VerbsPair::kBytes);
  }
  return out;
}

TEST(Striping, IsInProportionToTheSpeedsOfThePorts) {
  // 4 lanes of 50, 25 and 25 Gb/s.
  VerbsPair pair({.devices = 3, .speeds = {64, 32, 32}}, {{"verbs.slice_kib", "64"}});
  pair.connect();
  const std::vector<double> got = shares(pair, 3);
  EXPECT_NEAR(got[0], 0.5, 0.08);
  EXPECT_NEAR(got[1], 0.25, 0.08);
  EXPECT_NEAR(got[2], 0.25, 0.08);
}

TEST(Rails, ALostOneReturnsAfterTheHoldDownAndNotBefore) {
  VerbsPair pair({.devices = 2}, {{"verbs.hold_ms", "1000"}});
  pair.tick = milliseconds(1);
  pair.connect();
  pair.fake->set_port(1, false);
  pair.steps(100);  // a flap that nobody sees harms nobody
  pair.fake->set_port(1, true);
  const Time struck = pair.clock.now();
  while (pair.clock.now() - struck < milliseconds(700)) {
    ASSERT_EQ(shares(pair, 2)[1], 0) << "back too soon";
    pair.steps(50);
  }
  pair.steps(600);
  EXPECT_GE(shares(pair, 2)[1], 0.25) << "not back";
}

}  // namespace
}  // namespace baton
