// The simulator against closed formulas, counted bytes and programs small enough to check by hand.
#include "collectives/proof/simulate.h"
#include "tests/test.h"

namespace baton::collectives::proof {

using schedules::ScheduleSpec;
using schedules::Step;

namespace {

constexpr double kAlpha = 5e-6, kBeta = 1 / 50e9;
constexpr double kLocalAlpha = 1.5e-6, kLocalBeta = 1 / 400e9;

// One piece, no contention, no CPU: what the closed formulas assume.
SimulateOptions formula_options(size_t bytes, double gamma = 0) {
  SimulateOptions options;
  options.cost.local = {kLocalAlpha, kLocalBeta};
  options.cost.remote = {kAlpha, kBeta};
  options.cost.gamma = gamma;
  options.cost.step = 0;
  options.bytes = bytes;
  options.contention = false;
  return options;
}

double seconds_of(const ScheduleSpec& spec, const SimulateOptions& options) {
  const absl::StatusOr<SimulateReport> report = simulate(spec, options);
  EXPECT_TRUE(report.ok()) << report.status();
  return report.ok() ? report->seconds : NAN;
}

void expect_within(double ratio, double actual, double expected, const ScheduleSpec& spec,
                   size_t bytes) {
  EXPECT_NEAR(actual / expected, 1, ratio) << spec.to_string() << " of " << bytes << " bytes";
}

struct Formula {
  Algorithm algorithm;
  bool powers_of_two;  // where it holds
  double (*seconds)(double n, double bytes, double gamma);
};

const Formula kAllReduceFormulas[] = {
    {Algorithm::kRing, false,
     [](double n, double s, double gamma) {
       return 2 * (n - 1) * (kAlpha + s / n * kBeta) + (n - 1) / n * s * gamma;
     }},
    {Algorithm::kRecursiveDoubling, true,
     [](double n, double s, double gamma) {
       return std::log2(n) * (kAlpha + s * kBeta + s * gamma);
     }},
    {Algorithm::kHalvingDoubling, true,
     [](double n, double s, double gamma) {
       return 2 * std::log2(n) * kAlpha + (n - 1) / n * s * (2 * kBeta + gamma);
     }},
    {Algorithm::kDirect, false,
     [](double n, double s, double gamma) {
       return 2 * (kAlpha + s / n * kBeta) + (n - 1) / n * s * gamma;
     }},
};

TEST(Simulate, EqualsTheClosedFormulasOfAllReduce) {
  for (const Formula& formula : kAllReduceFormulas) {
    for (uint32_t n : {2, 3, 4, 7, 8, 16, 31, 64}) {
      if (formula.powers_of_two && (n & (n - 1)) != 0) continue;
      for (size_t elements : {1, 1000, 1 << 20}) {
        const size_t bytes = elements * n * 4;
        for (double gamma : {0.0, 1 / 20e9}) {
          const ScheduleSpec spec{.algorithm = formula.algorithm, .ranks = n, .separate = true};
          expect_within(0.01, seconds_of(spec, formula_options(bytes, gamma)),
                        formula.seconds(n, static_cast<double>(bytes), gamma), spec, bytes);
        }
      }
    }
  }
}

// Up and down the deeper half of the tree, the whole vector each time.
TEST(Simulate, EqualsTheClosedFormulaOfTheTree) {
  for (uint32_t n : {2, 4, 8, 64, 1024}) {
    for (size_t bytes : {8, 1 << 20, 256 << 20}) {
      const ScheduleSpec spec{.algorithm = Algorithm::kTree, .ranks = n};
      expect_within(0.01, seconds_of(spec, formula_options(bytes)),
                    2 * std::log2(n) * (kAlpha + static_cast<double>(bytes) * kBeta), spec, bytes);
    }
  }
}

// Two trees, cut into pieces, on ports that take one message at a time: twice the vector, and the
// way up and down for the first piece.
TEST(Simulate, PipelinesTheDoubleTree) {
  const ScheduleSpec spec{.algorithm = Algorithm::kTree, .ranks = 64, .channels = 2};
  SimulateOptions options = formula_options(256 << 20);
  options.contention = true;
  options.piece_bytes = 256 << 10;
  options.lanes = 32;
  const double pieces_fill = 2 * 6 * (kAlpha + static_cast<double>(options.piece_bytes) * kBeta);
  const double expected = pieces_fill + 2 * static_cast<double>(options.bytes) * kBeta;
  expect_within(0.2, seconds_of(spec, options), expected, spec, options.bytes);
}

double hierarchical_seconds(double g, double m, double s, double gamma) {
  const double inside = 2 * (g - 1) * (kLocalAlpha + s / g * kLocalBeta) + (g - 1) / g * s * gamma;
  const double between = s / g;
  return inside + 2 * std::log2(m) * kAlpha + (m - 1) / m * between * (2 * kBeta + gamma);
}

TEST(Simulate, EqualsTheClosedFormulaOfTheHierarchy) {
  for (uint32_t g : {2, 4, 8}) {
    for (uint32_t m : {2, 8, 32}) {
      for (size_t bytes : {size_t{4} * g * m, size_t{1} << 20, size_t{256} << 20}) {
        for (double gamma : {0.0, 1 / 20e9}) {
          SimulateOptions options = formula_options(bytes, gamma);
          options.cost.node_size = g;
          const ScheduleSpec spec{
              .algorithm = Algorithm::kHierarchical, .ranks = g * m, .node_size = g};
          expect_within(0.01, seconds_of(spec, options),
                        hierarchical_seconds(g, m, static_cast<double>(bytes), gamma), spec, bytes);
        }
      }
    }
  }
}

TEST(Simulate, RunsThousandsOfRanks) {
  SimulateOptions options = formula_options(256 << 20);
  options.cost.node_size = 8;
  const ScheduleSpec spec{.algorithm = Algorithm::kHierarchical, .ranks = 4096, .node_size = 8};
  expect_within(0.01, seconds_of(spec, options),
                hierarchical_seconds(8, 512, static_cast<double>(options.bytes), 0), spec,
                options.bytes);
}

TEST(Simulate, CountsBytesOnTheWire) {
  for (uint32_t n : {2, 3, 8, 13}) {
    const size_t bytes = size_t{n} * 4096;
    SimulateOptions options = formula_options(bytes);
    const auto ring = simulate({.algorithm = Algorithm::kRing, .ranks = n}, options);
    ASSERT_TRUE(ring.ok()) << ring.status();
    EXPECT_EQ(ring->most_bytes_sent, 2 * (n - 1) * bytes / n);
    EXPECT_EQ(ring->most_bytes_received, 2 * (n - 1) * bytes / n);
    EXPECT_EQ(ring->messages, 2 * (n - 1) * n);
    // However it is cut.
    options.piece_bytes = bytes / 4;
    const auto cut = simulate({.algorithm = Algorithm::kRing, .ranks = n}, options);
    ASSERT_TRUE(cut.ok()) << cut.status();
    EXPECT_EQ(cut->most_bytes_sent, 2 * (n - 1) * bytes / n);
    EXPECT_EQ(cut->messages, 4 * 2 * (n - 1) * n);
    const auto all_to_all =
        simulate({.collective = Collective::kAllToAll, .algorithm = Algorithm::kDirect, .ranks = n},
                 options);
    ASSERT_TRUE(all_to_all.ok()) << all_to_all.status();
    EXPECT_EQ(all_to_all->most_bytes_sent, (n - 1) * bytes / n);
  }
}

TEST(Simulate, ContentionLengthensAllToAll) {
  constexpr uint32_t kRanks = 16;
  constexpr size_t kBytes = kRanks << 20;
  const ScheduleSpec spec{
      .collective = Collective::kAllToAll, .algorithm = Algorithm::kDirect, .ranks = kRanks};
  SimulateOptions options = formula_options(kBytes);
  const double block = static_cast<double>(kBytes) / kRanks * kBeta;
  expect_within(1e-6, seconds_of(spec, options), kAlpha + block, spec, kBytes);
  options.contention = true;
  expect_within(1e-6, seconds_of(spec, options), kAlpha + (kRanks - 1) * block, spec, kBytes);
}

TEST(Simulate, EverybodyWaitsForALateRank) {
  SimulateOptions options = formula_options(1 << 20);
  const ScheduleSpec spec{.algorithm = Algorithm::kHalvingDoubling, .ranks = 8};
  const double on_time = seconds_of(spec, options);
  options.late.assign(8, 0.0);
  options.late[5] = 1e-3;
  const auto report = simulate(spec, options);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_NEAR(report->seconds, 1e-3 + on_time, on_time * 0.5);
  EXPECT_GE(report->seconds, 1e-3);
  for (double seconds : report->rank_seconds) EXPECT_GE(seconds, 1e-3);
}

TEST(Simulate, IsTheSameEveryTime) {
  SimulateOptions options = formula_options(3 << 20, 1e-10);
  options.contention = true;
  options.piece_bytes = 100'000;
  options.cost.step = 1e-6;
  for (Algorithm algorithm : {Algorithm::kRing, Algorithm::kTree, Algorithm::kDirect}) {
    const ScheduleSpec spec{.algorithm = algorithm, .ranks = 13, .channels = 2};
    const auto once = simulate(spec, options), again = simulate(spec, options);
    ASSERT_TRUE(once.ok() && again.ok());
    EXPECT_EQ(once->rank_seconds, again->rank_seconds);
    EXPECT_EQ(once->messages, again->messages);
  }
}

// --- programs written by hand ------------------------------------------------------------------

using Programs = std::vector<std::vector<Step>>;

absl::StatusOr<SimulateReport> run(const Programs& programs, const SimulateOptions& options) {
  const ScheduleSpec spec{.collective = Collective::kBroadcast,
                          .algorithm = Algorithm::kDirect,
                          .ranks = static_cast<uint32_t>(programs.size())};
  return simulate(
      spec,
      [&programs](uint32_t rank, uint32_t) -> absl::StatusOr<schedules::Program> {
        return schedules::Program{.steps = programs[rank]};
      },
      options);
}

Step send_to(uint32_t peer) { return {.kind = Step::Kind::kSend, .peer = peer}; }
Step receive_from(uint32_t peer) { return {.kind = Step::Kind::kReceive, .peer = peer}; }
Step reduce_from(uint32_t peer) { return {.kind = Step::Kind::kReceiveReduce, .peer = peer}; }

SimulateOptions second_options() {
  SimulateOptions options;
  options.cost.local = {100, 1};
  options.cost.remote = {1000, 10};
  options.cost.gamma = 2;
  options.cost.step = 3;
  options.bytes = 7;
  return options;
}

TEST(Simulate, AddsUpOneMessage) {
  const auto remote = run({{send_to(1)}, {reduce_from(0)}}, second_options());
  ASSERT_TRUE(remote.ok()) << remote.status();
  // Posted, on the wire, under way, taken and combined.
  EXPECT_DOUBLE_EQ(remote->rank_seconds[0], 3 + 70);
  EXPECT_DOUBLE_EQ(remote->rank_seconds[1], 3 + 70 + 1000 + 3 + 14);
  SimulateOptions options = second_options();
  options.cost.node_size = 2;
  const auto local = run({{send_to(1)}, {receive_from(0)}}, options);
  ASSERT_TRUE(local.ok()) << local.status();
  EXPECT_DOUBLE_EQ(local->seconds, 3 + 7 + 100 + 3);
}

TEST(Simulate, QueuesForPortsOfOneClass) {
  SimulateOptions options = second_options();
  options.cost.step = 0;
  // Out of one port, one after the other.
  const auto out = run({{send_to(1), send_to(2)}, {receive_from(0)}, {receive_from(0)}}, options);
  ASSERT_TRUE(out.ok()) << out.status();
  EXPECT_DOUBLE_EQ(out->rank_seconds[1], 1070);
  EXPECT_DOUBLE_EQ(out->rank_seconds[2], 1140);
  // Into one port, one after the other.
  const Programs gather = {{receive_from(1), receive_from(2)}, {send_to(0)}, {send_to(0)}};
  const auto in = run(gather, options);
  ASSERT_TRUE(in.ok()) << in.status();
  EXPECT_DOUBLE_EQ(in->seconds, 1140);
  options.contention = false;
  const auto free = run(gather, options);
  ASSERT_TRUE(free.ok()) << free.status();
  EXPECT_DOUBLE_EQ(free->seconds, 1070);
  // Rank 1 is on our node: another port.
  options = second_options();
  options.cost.step = 0;
  options.cost.node_size = 2;
  const auto both = run({{send_to(1), send_to(2)}, {receive_from(0)}, {receive_from(0)}}, options);
  ASSERT_TRUE(both.ok()) << both.status();
  EXPECT_DOUBLE_EQ(both->rank_seconds[1], 107);
  EXPECT_DOUBLE_EQ(both->rank_seconds[2], 1070);
}

TEST(Simulate, LetsASenderBeOnlySoFarAhead) {
  // The receiver first waits for rank 2, who is late.
  const Programs programs = {{send_to(1), send_to(1), send_to(1), send_to(2)},
                             {receive_from(2), receive_from(0), receive_from(0), receive_from(0)},
                             {send_to(1), receive_from(0)}};
  SimulateOptions options = second_options();
  options.cost.step = 0;
  options.late = {0, 0, 50'000};
  const auto two = run(programs, options);
  ASSERT_TRUE(two.ok()) << two.status();
  // Rank 2's message, word that the first is taken, and then the third message.
  EXPECT_DOUBLE_EQ(two->rank_seconds[1], 50'000 + 1070 + 1000 + 1070);
  options.messages_ahead = 3;
  const auto three = run(programs, options);
  ASSERT_TRUE(three.ok()) << three.status();
  EXPECT_DOUBLE_EQ(three->rank_seconds[1], 50'000 + 1070);
}

TEST(Simulate, OneCoreWorksForAllLanes) {
  SimulateOptions options = second_options();
  options.bytes = 400;
  options.piece_bytes = 100;
  options.cost.step = 0;
  options.cost.gamma = 1000;  // nothing else matters
  const auto report = run({{send_to(1)}, {reduce_from(0)}}, options);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_DOUBLE_EQ(report->seconds, 1000 + 100 * 10 + 400 * 1000);
}

TEST(Simulate, NamesDeadlockedRanks) {
  const auto lost = run({{receive_from(1)}, {}}, second_options());
  EXPECT_EQ(lost.status().code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(lost.status().message()),
              testing::HasSubstr("rank 0 waits for ever in step 0 of piece 0, for a message from "
                                 "rank 1"));
  const auto full = run({{send_to(1), send_to(1), send_to(1)}, {}}, second_options());
  EXPECT_THAT(std::string(full.status().message()),
              testing::HasSubstr("step 2 of piece 0, for room to send to rank 1"));
}

TEST(Simulate, RefusesNonsense) {
  const ScheduleSpec spec{.ranks = 4};
  const auto refuses = [&spec](auto change) {
    SimulateOptions options;
    change(options);
    return simulate(spec, options).status().code() == absl::StatusCode::kInvalidArgument;
  };
  EXPECT_TRUE(refuses([](SimulateOptions& o) { o.lanes = 0; }));
  EXPECT_TRUE(refuses([](SimulateOptions& o) { o.messages_ahead = 0; }));
  EXPECT_TRUE(refuses([](SimulateOptions& o) { o.piece_bytes = 0; }));
  EXPECT_TRUE(refuses([](SimulateOptions& o) { o.bytes = SIZE_MAX; }));
  EXPECT_TRUE(refuses([](SimulateOptions& o) { o.cost.gamma = -1; }));
  EXPECT_TRUE(refuses([](SimulateOptions& o) { o.cost.remote.beta = NAN; }));
  EXPECT_TRUE(refuses([](SimulateOptions& o) { o.cost.node_size = 0; }));
  EXPECT_TRUE(refuses([](SimulateOptions& o) { o.late = {1, 2}; }));
  EXPECT_TRUE(refuses([](SimulateOptions& o) { o.late = {0, 0, 0, -1}; }));
  EXPECT_FALSE(refuses([](SimulateOptions&) {}));
  // Programs that name what does not exist.
  EXPECT_EQ(run({{send_to(2)}, {}}, {}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(run({{send_to(0)}, {}}, {}).status().code(), absl::StatusCode::kInvalidArgument);
  Step beyond = send_to(1);
  beyond.source.part = 1;
  EXPECT_EQ(run({{beyond}, {}}, {}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(simulate({.collective = Collective::kAllToAll, .algorithm = Algorithm::kRing}, {})
                .status()
                .code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace baton::collectives::proof
