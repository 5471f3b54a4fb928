// Communicators in virtual time: schedules of what may happen to them, and single cases.
//
// tests/seeds.h says which seeds run.
#include "tests/communicator/sim_lives.h"
#include "tests/sanitized.h"
#include "tests/seeds.h"

namespace baton {
namespace {

// Promise(collectives): Whatever the network and other ranks do, every call of every group ends,
//   what ends well is right, nothing is written later, a group notices nothing of another one's
//   end, and whoever is left goes on in place, with others or without | seeded schedules of
//   create, subgroup, split, abort, leaving, death, stops, cut and slow links and reconfigure in
//   virtual time
// Promise(collectives): split() by colour and key puts ranks together as MPI_Comm_split does | no
//   connection and no socket is made for it
TEST(SimGroups, EveryCallEndsAndWhoIsLeftGoesOn) {
  setenv("BATON_FLIGHT_RECORDER", "none", 1);
  const Seeds seeds(kSanitized ? 60 : 2000);
  Tally seen;
  for (uint64_t seed = seeds.begin; seed < seeds.end; ++seed) {
    SCOPED_TRACE(testing::Message() << "BATON_SEED=" << seed);
    std::make_unique<Lives>(seed, seen)->run(3);
    if (testing::Test::HasFailure()) return;
    if ((seed + 1) % 1000 == 0) std::cout << seed + 1 << " schedules" << std::endl;
  }
  for (const auto& [what, times] : seen.times) std::cout << times << " " << what << "\n";
  if (seeds.one || seeds.count() < 60) return;
  EXPECT_EQ(seen.times.size(), 19u) << "something never happened";
}

// Two groups of two ranks whose link is so slow that what one group has sent holds up its end.
class Parting : public SimGroup {
 public:
  Parting() : SimGroup({.nodes = 2, .link = {.bytes_per_second = 4e6}}, seconds(10)) {
    for (const auto& comm : comms_) {
      other_.push_back(*comm->subgroup({0, 1}, sim_group(0, seconds(10))));
    }
  }
  ~Parting() {
    for (auto& comm : other_) comm->abort(absl::CancelledError("over"));
    drive_for(milliseconds(40));
  }

  void run(bool leaves) {
    wait_ready();
    // A megabyte takes a quarter of a second.
    std::array<CommBuffer, 2> memory = {*endpoints_[0]->allocate(1 << 20),
                                        *endpoints_[1]->allocate(1 << 20)};
    std::vector<Work> works;
    std::vector<std::unique_ptr<SimCall>> others;
    for (size_t node = 0; node < 2; ++node) {
      const int peer = 1 - static_cast<int>(node);
      works.push_back(
          node == 0 ? *comms_[0]->send_async(memory[0].data, 1 << 20, DataType::kU8, peer)
                    : *comms_[1]->receive_async(memory[1].data, 1 << 20, DataType::kU8, peer));
      for (const size_t kind : {0, 8}) {
        others.push_back(std::make_unique<SimCall>(*other_[node], kind, 100000, 0));
      }
    }
    drive_for(milliseconds(60));
    const Time begun = now();
    comms_[0]->abort(absl::CancelledError("by the test"));
    if (leaves) comms_[0].reset();
    const auto ended = [&](size_t node) {
      return comms_[node] == nullptr || comms_[node]->test(works[node]).has_value();
    };
    // A call's end is reported once.
    std::array<bool, 2> over{};
    ASSERT_TRUE(drive(
        [&] {
          for (size_t node = 0; node < 2; ++node) over[node] = over[node] || ended(node);
          return over[0];
        },
        milliseconds(50)));
    EXPECT_LE(now() - begun, milliseconds(50));
    std::memset(memory[0].data, 1, memory[0].size);
    ASSERT_TRUE(drive(
        [&] {
          over[1] = over[1] || ended(1);
          bool all = over[1];
          for (size_t i = 0; i < others.size(); ++i) all &= others[i]->ended(*other_[i / 2]);
          return all;
        },
        seconds(10)));
    for (const auto& call : others) EXPECT_EQ(call->status(), absl::OkStatus());
    EXPECT_EQ(other_[0]->status(), absl::OkStatus());
    EXPECT_GT(fabric_.stats().rails_lost, 0u) << "nothing held it up";
    for (size_t node = 0; node < 2; ++node) endpoints_[node]->free(memory[node]);
  }

 private:
  std::vector<std::unique_ptr<Communicator>> other_;
};

// Promise(collectives): A group whose end the wire holds up ends within 50 ms, and other groups of
//   the same processes go on | the paths that hold its memory are closed and made anew
TEST(SimGroups, TheEndOfOneGroupBreaksNoOther) {
  setenv("BATON_FLIGHT_RECORDER", "none", 1);
  for (const bool leaves : {false, true}) Parting().run(leaves);
}

// Four ranks that sum by a ring, where rank 3 still is in an earlier call, of this group or of
// another one, which the stopped one holds up.
class Stopped : public SimGroup {
 public:
  static constexpr size_t kVictim = 2;
  Stopped() : SimGroup({.nodes = 4}, milliseconds(300)) {}

  void run(bool elsewhere) {
    wait_ready();
    if (elsewhere) pair_ = *comms_[3]->subgroup({2, 3}, sim_group(0, milliseconds(300)));
    fabric_.freeze(places_[kVictim], now(), seconds(1000));
    float data[4] = {};
    std::vector<Work> works(nodes_);
    for (const size_t node : {0, 1, 3}) {
      const CallOptions patient{.timeout = seconds(10)};
      works[node] =
          must(node == 3 ? (elsewhere ? *pair_ : *comms_[3])
                               .receive_async(data + 3, 1, DataType::kF32, elsewhere ? 0 : kVictim,
                                              patient)
                         : comms_[node]->all_reduce_async(
                               data + node, data + node, 1, DataType::kF32, ReduceOp::kSum,
                               {.algorithm = Algorithm::kRing, .timeout = seconds(4)}));
    }
    const Time begun = now();
    std::vector<std::optional<absl::Status>> ends(nodes_);
    ASSERT_TRUE(until([&](size_t node) {
      if (node == 3 && elsewhere) return true;
      return ends[node].has_value() || (ends[node] = comms_[node]->test(works[node])).has_value();
    }));
    EXPECT_LE(now() - begun, seconds(4) + milliseconds(200));
    for (const size_t node : {0, 1, 3}) {
      if (!ends[node].has_value()) continue;
      EXPECT_THAT(text(*ends[node]), testing::AllOf(testing::HasSubstr("rank 2 ("),
                                                    testing::HasSubstr("does not answer")));
      EXPECT_EQ(comms_[node]->lost_ranks(), std::vector<int>{kVictim}) << "at rank " << node;
    }
  }

 private:
  // True at all nodes that run.
  bool until(const std::function<bool(size_t)>& fact) {
    return fabric_.run_until(
        [&] {
          fabric_.at(now() + milliseconds(1), [] {});
          progress_all();
          bool all = true;
          for (size_t node = 0; node < nodes_; ++node) {
            all &= frozen(node) || fact(node);
          }
          return all;
        },
        seconds(20));
  }

  std::unique_ptr<Communicator> pair_;
};

// Promise(collectives): At a deadline every survivor names the stopped rank, not one that waits for
//   it elsewhere, within 0.2 s | all are asked before the deadline; in virtual time
TEST(SimGroups, AStoppedRankIsNamedAndNotOneThatWaitsForIt) {
  setenv("BATON_FLIGHT_RECORDER", "none", 1);
  for (const bool elsewhere : {false, true}) Stopped().run(elsewhere);
}

// Two ranks, one of which has begun several large calls long before the other.
class Late : public SimGroup {
 public:
  Late() : SimGroup({.nodes = 2}, seconds(4)) {}

  void run() {
    wait_ready();
    begin(0);
    drive_for(milliseconds(5));
    const uint64_t before = submitted();
    drive_for(milliseconds(100));
    // The failure detector asks now and then.
    EXPECT_LE(submitted(), before + 10) << "it repeats what it has said";
    begin(1);
    ASSERT_TRUE(drive(
        [&] {
          return std::all_of(calls_.begin(), calls_.end(), [&](auto& call) {
            return call.second->ended() || call.second->ended(*comms_[call.first]);
          });
        },
        seconds(4)));
    for (const auto& [node, call] : calls_) EXPECT_EQ(call->status(), absl::OkStatus());
  }

 private:
  uint64_t submitted() const { return endpoints_[0]->worker().stats().transfers_submitted; }
  void begin(size_t node) {
    for (const size_t count : {100000, 150000, 200000}) {
      calls_.emplace_back(node, std::make_unique<SimCall>(*comms_[node], 0, count, 0));
    }
  }

  std::vector<std::pair<size_t, std::unique_ptr<SimCall>>> calls_;
};

// Promise(collectives): A rank that waits for a late one in several calls sends it nothing
//   meanwhile | each call is announced once to a peer that has granted no place
TEST(SimGroups, CallsThatWaitForALateRankAreAnnouncedOnce) {
  setenv("BATON_FLIGHT_RECORDER", "none", 1);
  Late().run();
}

}  // namespace
}  // namespace baton
