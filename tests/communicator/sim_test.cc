// The executor over the simulated fabric, in virtual time: two rails between any two ranks, with
// loss, repetition, overtaking and rails that go down, and the right bytes at the end.
#include "collectives/executor/executor.h"
#include "collectives/executor/transfer_link.h"
#include "tests/communicator/message_plan.h"
#include "tests/sanitized.h"
#include "tests/sim/fabric/fabric.h"
#include "tests/test.h"
#include "transport/address.h"
#include "transport/worker.h"

namespace baton::collectives {

using executor::TransferLink;

namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr size_t kSlot = 64 << 10;

// Ranks on a fabric, without a communicator: workers, links and executors.
class SimGroup {
 public:
  SimGroup(uint32_t ranks, sim::SimOptions options) : fabric_(options), ranks_(ranks) {
    for (uint32_t r = 0; r < ranks; ++r) {
      auto worker = Worker::create({.name = "rank",
                                    .clock = &fabric_.clock(),
                                    .extra_providers = {fabric_.provider_factory(r)}});
      EXPECT_TRUE(worker.ok()) << worker.status();
      fabric_.attach(**worker, r);
      workers_.push_back(*std::move(worker));
      memories_.push_back(*executor::Memory::create(*workers_.back()));
    }
    std::vector<std::vector<PeerId>> peers(ranks, std::vector<PeerId>(ranks));
    for (uint32_t a = 0; a < ranks; ++a) {
      for (uint32_t b = 0; b < ranks; ++b) {
        if (a != b) peers[a][b] = *workers_[a]->connect(workers_[b]->address());
      }
    }
    EXPECT_TRUE(fabric_.run_until(
        [&] {
          for (uint32_t a = 0; a < ranks; ++a) {
            for (uint32_t b = 0; b < ranks; ++b) {
              if (a != b && workers_[a]->peer_state(peers[a][b]) != PeerState::kUp) return false;
            }
          }
          return true;
        },
        seconds(10)));
    links_.resize(ranks);
    for (uint32_t a = 0; a < ranks; ++a) {
      links_[a].resize(ranks);
      for (uint32_t b = 0; b < ranks; ++b) {
        if (a == b) continue;
        auto link = TransferLink::create(*workers_[a], *memories_[a], peers[a][b], kSlot);
        EXPECT_TRUE(link.ok()) << link.status();
        links_[a][b] = *std::move(link);
      }
    }
    for (uint32_t a = 0; a < ranks; ++a) {
      std::vector<executor::Link*> row;
      for (uint32_t b = 0; b < ranks; ++b) {
        if (a != b)
          links_[a][b]->set_offer(*TransferLink::Offer::decode(links_[b][a]->offer().encode()));
        row.push_back(links_[a][b].get());
      }
      executors_.push_back(std::make_unique<executor::Executor>(a, row, memories_[a].get(),
                                                                fabric_.clock(), nullptr));
    }
  }

  sim::SimFabric& fabric() { return fabric_; }
  // Whether any rank has taken memory for its links.
  bool any_memory() const {
    return std::any_of(memories_.begin(), memories_.end(),
                       [](const auto& memory) { return !memory->regions().empty(); });
  }

  // Sums one vector per rank by this schedule; what every rank got.
  std::vector<std::vector<float>> all_reduce(Algorithm algorithm, bool ordered,
                                             std::vector<std::vector<float>> data) {
    const schedules::ScheduleSpec spec{.collective = Collective::kAllReduce,
                                       .algorithm = algorithm,
                                       .ranks = ranks_,
                                       .ordered = ordered};
    std::vector<std::vector<executor::PreparedProgram>> programs(ranks_);
    std::vector<executor::Call> calls(ranks_);
    const size_t part =
        kSlot / std::max(1u, schedules::max_message_parts(spec)) / sizeof(float) / 4;
    for (uint32_t r = 0; r < ranks_; ++r) {
      auto program = schedules::write_program(spec, r);
      EXPECT_TRUE(program.ok()) << program.status();
      programs[r].push_back(executor::prepare(*std::move(program), spec.collective, r, true));
      executor::Call& call = calls[r];
      call.geometry = {Collective::kAllReduce, sizeof(float), data[r].size(), part,
                       schedules::parts_of(spec)};
      call.in = call.out = reinterpret_cast<std::byte*>(data[r].data());
      call.programs = &programs[r];
      call.pieces = call.geometry.pieces();
      call.descriptor.sequence = ++sequence_;
      executors_[r]->start(call);
    }
    EXPECT_TRUE(run_until_idle()) << spec.to_string();
    EXPECT_EQ(fabric_.violations().size(), 0u);
    return data;
  }

  // Runs a plan of sends and receives, and looks at what has come.
  void exchange(const MessagePlan& plan) {
    struct Flow {
      executor::Call call;
      Block block;  // data null: the vector
      std::vector<std::byte> own;
    };
    std::vector<std::vector<std::unique_ptr<Flow>>> flows(ranks_);
    for (uint32_t r = 0; r < ranks_; ++r) {
      for (const PlannedCall& planned : plan.calls(static_cast<int>(r))) {
        const size_t bytes = planned.message.bytes;
        flows[r].push_back(std::make_unique<Flow>());
        Flow& flow = *flows[r].back();
        if (planned.registered) {
          flow.block = *memories_[r]->allocate(bytes + 1);
        } else {
          flow.own.resize(bytes + 1);
        }
        std::byte* data = planned.registered ? flow.block.data : flow.own.data();
        if (planned.sends) MessagePlan::fill(planned.message, data);
        executor::Call& call = flow.call;
        call.geometry = {Collective::kSendReceive, 1, bytes, kSlot, 1};
        call.type = DataType::kU8;
        (planned.sends ? call.in : call.out) = data;
        call.sends = planned.sends;
        call.peer = planned.other == kAnyRank ? executor::PointToPoint::kAnyPeer
                                              : static_cast<uint32_t>(planned.other);
        call.tag = planned.message.tag;
        call.pieces = call.geometry.pieces();
        executors_[r]->start(call);
      }
    }
    ASSERT_TRUE(run_until_idle());
    ASSERT_EQ(fabric_.violations().size(), 0u);
    for (uint32_t r = 0; r < ranks_; ++r) {
      MessagePlan::Checker checker;
      for (size_t i = 0; i < flows[r].size(); ++i) {
        const PlannedCall& planned = plan.calls(static_cast<int>(r))[i];
        Flow& flow = *flows[r][i];
        if (!planned.sends) {
          checker.check(planned, static_cast<int>(flow.call.peer), flow.call.out);
          if (testing::Test::HasFatalFailure()) return;
        }
        if (planned.registered) memories_[r]->free(flow.block);
      }
    }
  }

 private:
  bool run_until_idle() {
    return fabric_.run_until(
        [&] {
          bool idle = true;
          for (auto& executor : executors_) {
            bool any = true;
            hear();
            while (any) {
              auto moved = executor->advance();
              EXPECT_TRUE(moved.ok()) << moved.status();
              any = moved.ok() && *moved;
            }
            idle &= executor->idle();
          }
          // What is still on its way would hold up the end of a link, for which no time passes.
          for (auto& row : links_) {
            for (auto& link : row) idle &= link == nullptr || !link->unsettled();
          }
          return idle;
        },
        seconds(20));
  }

  // Packets of sends and receives; announcements say which slots have been read.
  void hear() {
    Notification note;
    for (uint32_t a = 0; a < ranks_; ++a) {
      while (const auto event = workers_[a]->next_peer_event()) {
        if (event->kind == PeerEvent::Kind::kUp) met_.push_back({a, event->peer, event->uid});
      }
      while (workers_[a]->next_notification(note)) {
        TransferLink& link = *links_[a][rank_of(a, note.peer)];
        if (note.payload[sizeof(uint64_t)] == TransferLink::kPacket) {
          link.came(std::string_view(note.payload).substr(sizeof(uint64_t) + 1));
          continue;
        }
        TransferLink::Announcement theirs;
        ASSERT_EQ(note.payload.size(), sizeof(uint64_t) + 1 + sizeof theirs);
        std::memcpy(&theirs, note.payload.data() + sizeof(uint64_t) + 1, sizeof theirs);
        link.announced(theirs);
      }
    }
  }

  // Both have connected, so each knows the other as two peers.
  uint32_t rank_of(uint32_t at, PeerId peer) const {
    for (const Met& met : met_) {
      if (met.at != at || !(met.peer == peer)) continue;
      for (uint32_t r = 0; r < ranks_; ++r) {
        if (Address::decode(workers_[r]->address())->uid == met.uid) return r;
      }
    }
    ADD_FAILURE() << "a notification of a peer that never came up";
    return at == 0 ? 1 : 0;
  }

  struct Met {
    uint32_t at;
    PeerId peer;
    WorkerUid uid;
  };
  sim::SimFabric fabric_;
  const uint32_t ranks_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<std::unique_ptr<executor::Memory>> memories_;
  std::vector<std::vector<std::unique_ptr<TransferLink>>> links_;
  std::vector<std::unique_ptr<executor::Executor>> executors_;
  std::vector<Met> met_;
  uint64_t sequence_ = 0;
};

std::vector<std::vector<float>> inputs(uint32_t ranks, size_t count) {
  std::vector<std::vector<float>> out(ranks, std::vector<float>(count));
  for (uint32_t r = 0; r < ranks; ++r) {
    for (size_t i = 0; i < count; ++i) out[r][i] = static_cast<float>((i * 5 + r * 11) % 23);
  }
  return out;
}

TEST(SimExecutor, EveryAlgorithmGivesTheRightSumOnABadFabric) {
  for (uint32_t ranks : {2u, 3u, 5u}) {
    SimGroup group(
        ranks,
        {.seed = 11 + ranks,
         .nodes = ranks,
         .rails = 2,
         .link = {.bytes_per_second = 1e9, .loss = 0.01, .duplicate = 0.01, .reorder = 0.1}});
    const size_t count = 60001;
    const auto in = inputs(ranks, count);
    std::vector<float> wanted(count);
    for (const auto& row : in) {
      for (size_t i = 0; i < count; ++i) wanted[i] += row[i];
    }
    for (bool ordered : {false, true}) {
      for (Algorithm algorithm : schedules::algorithms_for(Collective::kAllReduce, ordered)) {
        for (const auto& got : group.all_reduce(algorithm, ordered, in)) {
          ASSERT_EQ(got, wanted) << name_of(algorithm) << " n=" << ranks;
        }
      }
    }
    EXPECT_GT(group.fabric().stats().lost, 0u);
  }
}

// Promise(collectives): A rank takes memory for a link when it is first used | slots are made when
//   their sender asks
TEST(SimExecutor, LinksTakeMemoryWhenTheyAreUsed) {
  SimGroup group(3, {.nodes = 3});
  EXPECT_FALSE(group.any_memory());
  group.all_reduce(Algorithm::kRing, false, inputs(3, 100));
  EXPECT_TRUE(group.any_memory());
}

TEST(SimExecutor, ARailThatGoesDownInTheMiddleLosesAndRepeatsNothing) {
  const auto seeds = static_cast<uint64_t>(rounds_of(8, 2));
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    SimGroup group(2, {.seed = seed, .nodes = 2, .rails = 2, .link = {.bytes_per_second = 0.2e9}});
    group.fabric().flap(0, 1, 0, group.fabric().clock().now() + milliseconds(1),
                        group.fabric().clock().now() + milliseconds(12));
    const size_t count = 2000000;
    const auto in = inputs(2, count);
    std::vector<float> wanted(count);
    for (size_t i = 0; i < count; ++i) wanted[i] = in[0][i] + in[1][i];
    for (const auto& got : group.all_reduce(Algorithm::kRing, false, in)) ASSERT_EQ(got, wanted);
    EXPECT_GT(group.fabric().stats().rails_lost, 0u) << "the flap came too late to matter";
  }
}

TEST(SimExecutor, RandomSendsAndReceivesGiveWhatAModelSaysOnABadFabric) {
  const auto seeds = static_cast<uint64_t>(rounds_of(12, 4));
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    SCOPED_TRACE(seed);
    const auto ranks = static_cast<uint32_t>(2 + seed % 3);
    SimGroup group(
        ranks,
        {.seed = seed,
         .nodes = ranks,
         .rails = 2,
         .link = {.bytes_per_second = 1e9, .loss = 0.01, .duplicate = 0.01, .reorder = 0.1}});
    if (seed % 2 == 0) {
      group.fabric().flap(0, 1, 0, group.fabric().clock().now() + milliseconds(1),
                          group.fabric().clock().now() + milliseconds(12));
    }
    group.exchange(MessagePlan(seed, static_cast<int>(ranks), 60, 1 << 20));
    if (testing::Test::HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace baton::collectives
