// Calls over the simulated fabric, in virtual time: two rails between any two ranks, with loss,
// repetition, overtaking and rails that go down, and the right bytes at the end.
#include "collectives/schedules/schedule.h"
#include "tests/communicator/message_plan.h"
#include "tests/communicator/sim_nodes.h"
#include "tests/communicator/windows_litmus.h"
#include "tests/sanitized.h"

namespace baton {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr sim::SimLink kBad = {
    .bytes_per_second = 1e9, .loss = 0.01, .duplicate = 0.01, .reorder = 0.1};

class Calls : public SimGroup {
 public:
  using SimGroup::SimGroup;
  ~Calls() { drive_for(milliseconds(20)); }

  sim::SimFabric& fabric() { return fabric_; }
  uint64_t link_bytes() const {
    uint64_t bytes = 0;
    for (const auto& comm : comms_) bytes += comm->stats().link_bytes;
    return bytes;
  }
  void flap(int from, int to) {  // in ms from now
    fabric_.flap(places_[0], places_[1], 0, now() + milliseconds(from), now() + milliseconds(to));
  }

  // Sums a vector of each rank.
  void all_reduce(size_t count, const CallOptions& options) {
    std::vector<std::vector<float>> data(nodes_, std::vector<float>(count));
    std::vector<float> wanted(count);
    for (size_t node = 0; node < nodes_; ++node) {
      for (size_t i = 0; i < count; ++i) {
        wanted[i] += data[node][i] = static_cast<float>((i * 5 + node * 11) % 23);
      }
    }
    std::vector<std::pair<size_t, absl::StatusOr<Work>>> works;
    for (size_t node = 0; node < nodes_; ++node) {
      works.emplace_back(node,
                         comms_[node]->all_reduce_async(data[node].data(), data[node].data(), count,
                                                        DataType::kF32, ReduceOp::kSum, options));
    }
    finish(works);
    for (const auto& got : data) ASSERT_EQ(got, wanted);
  }

  // Runs a plan of sends and receives, and looks at what has come.
  void exchange(const MessagePlan& plan) {
    std::vector<std::pair<const PlannedCall*, std::unique_ptr<CallMemory>>> flows;
    std::vector<std::pair<size_t, absl::StatusOr<Work>>> works;
    for (size_t node = 0; node < nodes_; ++node) {
      for (const PlannedCall& planned : plan.calls(static_cast<int>(node))) {
        flows.emplace_back(&planned, std::make_unique<CallMemory>(
                                         *comms_[node], planned.message.bytes, planned.registered));
        works.emplace_back(node, begin(*comms_[node], planned, flows.back().second->data()));
      }
    }
    finish(works);
    std::vector<MessagePlan::Checker> checkers(nodes_);
    for (size_t i = 0; i < flows.size() && !testing::Test::HasFailure(); ++i) {
      const auto& [node, work] = works[i];
      const auto& [planned, memory] = flows[i];
      if (planned->sends) continue;
      checkers[node].check(*planned, comms_[node]->source_of(*work), memory->data());
    }
  }

 private:
  void finish(const std::vector<std::pair<size_t, absl::StatusOr<Work>>>& works) {
    std::vector<bool> over(works.size());
    ASSERT_TRUE(drive(
        [&] {
          bool all = true;
          for (size_t i = 0; i < works.size(); ++i) {
            const auto& [node, work] = works[i];
            if (over[i]) continue;
            const auto ended = work.ok() ? comms_[node]->test(*work) : work.status();
            over[i] = ended.has_value();
            EXPECT_EQ(ended.value_or(absl::OkStatus()), absl::OkStatus());
            all &= over[i];
          }
          return all;
        },
        seconds(20)));
    EXPECT_THAT(fabric_.violations(), testing::IsEmpty());
  }
};

TEST(SimCalls, EveryAlgorithmGivesTheRightSumOnABadFabric) {
  for (const size_t ranks : {2, 3, 5}) {
    Calls group({.seed = 11 + ranks, .nodes = ranks, .rails = 2, .link = kBad});
    for (const bool ordered : {false, true}) {
      for (const Algorithm algorithm :
           collectives::schedules::algorithms_for(Collective::kAllReduce, ordered)) {
        SCOPED_TRACE(testing::Message() << name_of(algorithm) << " n=" << ranks);
        CallOptions options;
        options.ordered = ordered;
        options.algorithm = algorithm;
        options.chunk_bytes = 16 << 10;
        group.all_reduce(60001, options);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
    EXPECT_GT(group.fabric().stats().lost, 0u);
  }
}

// Promise(collectives): A rank takes memory for a link when it is first used | slots are made when
//   their sender asks
TEST(SimCalls, LinksTakeMemoryWhenTheyAreUsed) {
  Calls group({.nodes = 3});
  group.wait_ready();
  EXPECT_EQ(group.link_bytes(), 0u);
  group.all_reduce(100, {});
  EXPECT_GT(group.link_bytes(), 0u);
}

TEST(SimCalls, ARailThatGoesDownInTheMiddleLosesAndRepeatsNothing) {
  for (const int from : {1, 3, 9}) {
    Calls group({.nodes = 2, .rails = 2, .link = {.bytes_per_second = 0.2e9}});
    group.wait_ready();
    group.flap(from, 40);
    group.all_reduce(2000000, {.algorithm = Algorithm::kRing});
    EXPECT_GT(group.fabric().stats().rails_lost, 0u) << "the flap came too late to matter";
  }
}

TEST(SimCalls, RandomSendsAndReceivesGiveWhatAModelSaysOnABadFabric) {
  const auto seeds = static_cast<uint64_t>(rounds_of(12, 4));
  for (uint64_t seed = 1; seed <= seeds && !testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    const size_t ranks = 2 + seed % 3;
    Calls group({.seed = seed, .nodes = ranks, .rails = 2, .link = kBad});
    group.wait_ready();
    if (seed % 2 == 0) group.flap(1, 12);
    group.exchange(MessagePlan(seed, static_cast<int>(ranks), 60, 1 << 20));
  }
}

// The order that windows promise, in virtual time, over a network that loses, repeats and
// overtakes.
//
// tests/seeds.h says which seeds run.

// Promise(collectives): A signal is never seen before a byte of an earlier put of that rank to that
//   target | random puts and signals over a network that loses, repeats and overtakes, in virtual
//   time
TEST(SimWindows, NoSignalOvertakesAPut) { signals_of<Litmus>(Signals::kCounters, 20); }

// Promise(collectives): A word is never added to before a byte of an earlier put of that rank to
//   that target with that tag is there | the same with put_add(); signals that need not wait are
//   seen early there
TEST(SimWindows, NoWordOvertakesAPut) { signals_of<Litmus>(Signals::kWords, 20); }

// The order of the two tests above is not the network's: without it the same litmus notices.
TEST(SimWindows, WordsThatNeedNotWaitOvertake) {
  EXPECT_GT(signals_of<Litmus>(Signals::kWeakWords, 5).early, 0u);
}

}  // namespace

}  // namespace baton
