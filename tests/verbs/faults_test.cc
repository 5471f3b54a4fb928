// Everything that can break under a rail: what the transfers on it come to, that nothing is lost or
// repeated, and that the rail comes back.
#include <algorithm>
#include <chrono>
#include <thread>

#include "tests/fails_with.h"
#include "tests/until.h"
#include "tests/verbs/verbs_pair.h"

namespace baton {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::HasSubstr;

class Faults : public testing::Test {
 protected:
  // A write of 8 MiB with a counter and a notification, a read, and counting writes, under way
  // while `fault` happens; all end well, once, and the target has counted exactly.
  void expect_survived(VerbsPair& pair, const std::function<void()>& fault) {
    const CounterId counter = *pair.b.worker->allocate_counter();
    pair.fill(3);
    TransferRequest big = pair.request(Op::kWrite);
    big.counter = pair.b.worker->remote_counter(counter);
    big.increment = 1000;
    big.notify = "all of it";
    std::vector<TransferId> ids = {*pair.a.worker->submit(big)};
    const auto count_a_hundred = [&] {
      for (int i = 0; i < 100; ++i) {
        TransferRequest one = pair.request(Op::kWrite, 3000);
        one.counter = pair.b.worker->remote_counter(counter);
        ids.push_back(*pair.a.worker->submit(one));
      }
    };
    count_a_hundred();
    pair.steps(12);
    EXPECT_EQ(*pair.a.worker->state(ids[0]), TransferState::kActive) << "over before the fault";
    fault();
    count_a_hundred();
    for (TransferId id : ids) {
      EXPECT_EQ(pair.finish(id), absl::OkStatus());
    }
    pair.steps(200);
    EXPECT_EQ(pair.b.worker->counter_value(counter), 1200u);
    EXPECT_TRUE(pair.a.memory == pair.b.memory);
    Notification got;
    EXPECT_TRUE(pair.b.worker->next_notification(got));
    EXPECT_EQ(got.payload, "all of it");
    EXPECT_FALSE(pair.b.worker->next_notification(got)) << "told twice";
    EXPECT_EQ(pair.a.worker->stats().open_transfers, 0u);
  }
  // Whether both devices carry their part of a transfer.
  static bool both_carry(VerbsPair& pair) {
    const uint64_t before[] = {pair.fake->moved(0), pair.fake->moved(1)};
    EXPECT_TRUE(pair.run(pair.request(Op::kWrite)).ok());
    const size_t least = VerbsPair::kBytes / 4;
    return pair.fake->moved(0) - before[0] >= least && pair.fake->moved(1) - before[1] >= least;
  }
  using Settings = VerbsPair::Settings;
  const Settings quick_ = {{"verbs.timeout", "8"},
                           {"verbs.hold_ms", "20"},
                           {"verbs.stall_ms", "50"},
                           {"verbs.settle_ms", "50"}};
};

// What strikes a device of two, and what repairs it: the other one takes over, and it comes back.
struct Strike {
  const char* name;
  void (*strike)(FakeVerbs&, size_t device);
  void (*repair)(FakeVerbs&, size_t device) = nullptr;
  bool returns = true;
};
class OneOfTwo : public Faults, public testing::WithParamInterface<Strike> {};

// Promise(rdma): A broken completion queue or shared receive queue costs a rail for a moment |
//   asynchronous events are acted on
TEST_P(OneOfTwo, TheOtherTakesOverAndItComesBack) {
  for (const size_t device : {0, 1}) {
    SCOPED_TRACE(device);
    VerbsPair pair({.devices = 2}, quick_);
    pair.connect();
    EXPECT_TRUE(both_carry(pair)) << "transfers are striped over all devices";
    pair.expect_ready = GetParam().name != std::string("SharedReceives");
    expect_survived(pair, [&] { GetParam().strike(*pair.fake, device); });
    if (GetParam().repair != nullptr) {
      EXPECT_FALSE(both_carry(pair));
      GetParam().repair(*pair.fake, device);
    }
    pair.steps(10'000);
    EXPECT_EQ(both_carry(pair), GetParam().returns);
    expect_survived(pair, [] {});
    EXPECT_EQ(both_carry(pair), GetParam().returns) << "and stays";
  }
}
INSTANTIATE_TEST_SUITE_P(
    Verbs, OneOfTwo,
    testing::Values(
        Strike{"Port", [](FakeVerbs& fake, size_t device) { fake.set_port(device, false); },
               [](FakeVerbs& fake, size_t device) { fake.set_port(device, true); }},
        Strike{"Hanging", [](FakeVerbs& fake, size_t device) { fake.set_hanging(device, true); },
               [](FakeVerbs& fake, size_t device) { fake.set_hanging(device, false); }},
        Strike{"Device", [](FakeVerbs& fake, size_t device) { fake.kill(device); }, nullptr, false},
        Strike{"QueuePairs",
               [](FakeVerbs& fake, size_t device) { fake.break_queue_pairs(device); }},
        Strike{"CompletionQueues",
               [](FakeVerbs& fake, size_t device) { fake.break_completion_queues(device); }},
        Strike{"SharedReceives",
               [](FakeVerbs& fake, size_t device) { fake.break_shared_receives(device); }},
        Strike{"Addresses",
               [](FakeVerbs& fake, size_t device) {
                 std::vector<ibv_gid_entry> gids = fake.gids(device);
                 for (ibv_gid_entry& entry : gids) entry.gid_index += 5;
                 fake.set_gids(device, gids);
               }}),
    [](const auto& each) { return std::string(each.param.name); });

// Work on a completion queue that broke is not waited for as work that hangs is.
TEST_F(Faults, CompletionQueuesThatBreakAreNotWaitedFor) {
  VerbsPair pair({.devices = 2}, {});
  pair.connect();
  const Time before = pair.clock.now();
  expect_survived(pair, [&] { pair.fake->break_completion_queues(1); });
  EXPECT_LT(pair.clock.now() - before, milliseconds(1500));
}

// Promise(rdma): A port that is down when two peers meet has its rail once it is up | failed dials
//   are repeated when another rail is up
TEST_F(Faults, APortThatIsDownWhenThePeersMeetGetsItsRailLater) {
  for (const size_t device : {1, 0}) {
    SCOPED_TRACE(device);
    VerbsPair pair({.devices = 2}, quick_);
    pair.fake->set_port(device, false);
    pair.connect();
    EXPECT_FALSE(both_carry(pair));
    pair.fake->set_port(device, true);
    pair.steps(3000);
    EXPECT_TRUE(both_carry(pair)) << "there is no rail for the port";
  }
}

// A switch that starts anew, a cable in the wrong hand: nobody has another way to take.
// Promise(rdma): The only port may be down for `verbs.port_grace_ms`: nothing fails or is repeated
//   | its queue pairs stay
TEST_F(Faults, TheOnlyPortMayBlink) {
  VerbsPair pair({.devices = 1}, {{"verbs.qps", "2"}});
  pair.tick = milliseconds(1);
  pair.connect();
  const uint64_t made = pair.fake->stats().queue_pairs;
  for (int round = 0; round < 3; ++round) {
    expect_survived(pair, [&] {
      pair.fake->set_port(0, false);
      pair.steps(4000);
      pair.fake->set_port(0, true);
    });
  }
  EXPECT_EQ(pair.fake->stats().queue_pairs, made);
  EXPECT_EQ(pair.a.worker->stats().rails_lost, 0u);
}

TEST_F(Faults, APortThatComesBackWithOtherAddressesLosesItsRail) {
  VerbsPair pair({.devices = 1}, {});
  pair.tick = milliseconds(1);
  pair.connect();
  pair.fake->set_port(0, false);
  pair.steps(100);
  EXPECT_EQ(pair.a.worker->peer_state(pair.a.peer), PeerState::kUp);
  std::vector<ibv_gid_entry> gids = pair.fake->gids(0);
  for (ibv_gid_entry& entry : gids) entry.gid_index += 5;
  pair.fake->set_gids(0, gids);
  pair.fake->set_port(0, true);
  pair.steps(100);
  EXPECT_EQ(pair.a.worker->peer_state(pair.a.peer), PeerState::kDown);
}

TEST_F(Faults, ACableThatIsPulledIsFoundOutByRetries) {
  VerbsPair pair({.devices = 2}, quick_);
  pair.connect();
  expect_survived(pair, [&] { pair.fake->set_cable(1, false); });
  EXPECT_GT(pair.a.worker->stats().slices_moved, 0u);
  EXPECT_EQ(pair.a.worker->stats().rails_lost, 1u);
  EXPECT_THAT(pair.a.worker->explain(pair.a.peer),
              testing::AllOf(HasSubstr("RoCEv2 IPv4"), HasSubstr("the last rail that was lost: ")));
  EXPECT_FALSE(both_carry(pair));
  pair.fake->set_cable(1, true);
  pair.steps(30'000);
  EXPECT_TRUE(both_carry(pair)) << "the rail did not come back";
  pair.a.worker->disconnect(pair.a.peer, Time::zero()).IgnoreError();
  EXPECT_EQ(pair.a.worker->stats().rails_lost, 1u) << "what is closed is not lost";
}

// Its adapter has taken all that there were receives for; its program will never give credits back,
// or say where its region is. Nothing of ours is under way then, so no retry can fail.
TEST_F(Faults, APeerThatLosesItsPowerWhileItOwesAnAnswer) {
  Settings settings = quick_;
  settings.emplace_back("verbs.probe_ms", "100");
  for (const bool region_known : {true, false}) {
    SCOPED_TRACE(region_known);
    VerbsPair pair({.devices = 2}, settings);
    pair.connect();
    if (region_known) {
      EXPECT_TRUE(pair.run(pair.request(Op::kWrite)).ok());
    }
    std::vector<TransferId> ids;
    for (int i = 0; i < 1000; ++i) {
      TransferRequest told = pair.request(Op::kWrite, 64);
      told.notify = "look";
      ids.push_back(*pair.a.worker->submit(told));
    }
    const auto alone = [&](Time how_long) {
      for (const Time end = pair.clock.now() + how_long; pair.clock.now() < end;) {
        pair.a.worker->progress();
        pair.clock.advance(pair.tick);
      }
    };
    alone(milliseconds(20));
    const auto open = [&] {
      return static_cast<size_t>(std::count_if(ids.begin(), ids.end(), [&](TransferId id) {
        return !ended(*pair.a.worker->state(id));
      }));
    };
    EXPECT_EQ(open() < ids.size(), region_known);
    ASSERT_GT(open(), 0u) << "credits never end";
    for (size_t device : {0, 1}) pair.fake->set_cable(device, false);
    // A tenth of probe_ms, the adapter's retries, and what both ends would have to settle.
    alone(milliseconds(10) + 8 * milliseconds(2) + milliseconds(2 * 50));
    EXPECT_EQ(open(), 0u);
    for (TransferId id : ids) EXPECT_TRUE(pair.a.worker->release(id).ok());
    EXPECT_NE(pair.a.worker->peer_state(pair.a.peer), PeerState::kUp);
  }
}

// With nothing to send at all.
TEST_F(Faults, AQuietPeerThatLosesItsPowerIsMissedToo) {
  Settings settings = quick_;
  settings.emplace_back("verbs.probe_ms", "100");
  VerbsPair pair({.devices = 2}, settings);
  pair.connect();
  for (size_t device : {0, 1}) pair.fake->set_cable(device, false);
  EXPECT_TRUE(pair.within(
      milliseconds(300), [&] { return pair.a.worker->peer_state(pair.a.peer) != PeerState::kUp; }));
}

// Stopped, swapped out, a virtual machine that was moved: the adapter had no chance to be heard.
// Promise(rdma): A paused program or virtual machine blames no rail | time in which the program did
//   not look does not count
TEST_F(Faults, APausedWorkerBlamesNoPeer) {
  VerbsPair pair({.devices = 2}, quick_);
  pair.connect();
  for (const Time still : {milliseconds(60), milliseconds(5000)}) {
    expect_survived(pair, [&] { pair.clock.advance(still); });
  }
  EXPECT_EQ(pair.a.worker->stats().rails_lost, 0u);
}

// Until it says so (IBV_EVENT_QP_LAST_WQE_REACHED) it may hold a receive that belongs to all.
TEST_F(Faults, AQueuePairThatBreaksGivesBackTheReceiveThatItHad) {
  for (const int polls : {1, 20, 200}) {
    SCOPED_TRACE(polls);
    VerbsPair pair({.devices = 2}, quick_);
    pair.connect();
    pair.fake->set_slow_to_stop(polls);
    const size_t posted = pair.fake->shared_receives();
    for (int round = 0; round < 3; ++round) {
      expect_survived(pair, [&] { pair.fake->break_queue_pairs(1); });
      pair.steps(10'000);
      EXPECT_TRUE(both_carry(pair));
    }
    // Queue pairs are taken apart on a thread of their own, which knows nothing of virtual time.
    until([&] { return pair.fake->shared_receives() >= posted; },  // else receives were lost
          [&] {
            pair.step();
            std::this_thread::yield();
          });
  }
}

// An IPv6 address more, a container's bridge: it happens all the time, and to nobody's queue pair.
TEST_F(Faults, OtherAddressesOfThePortComeAndGo) {
  VerbsPair pair({.devices = 1}, quick_);
  pair.connect();
  const uint64_t made = pair.fake->stats().queue_pairs;
  expect_survived(pair, [&] {
    const std::vector<ibv_gid_entry> before = pair.fake->gids(0);
    std::vector<ibv_gid_entry> more = before;
    more.push_back(before[3]);
    more.back().gid_index = 9;
    more.back().gid.raw[15] = 77;
    pair.fake->set_gids(0, more);
    pair.steps(40);
    more.erase(more.begin());  // the RoCEv1 one, which nobody uses
    pair.fake->set_gids(0, more);
    pair.steps(40);
    pair.fake->set_gids(0, before);
  });
  EXPECT_EQ(pair.fake->stats().queue_pairs, made);
  EXPECT_EQ(pair.a.worker->stats().rails_lost, 0u);
}

TEST_F(Faults, ARefusedAccessCostsAQueuePairAndNothingElse) {
  VerbsPair pair({.devices = 1}, quick_);
  pair.connect();
  const CounterId counter = *pair.b.worker->allocate_counter();
  uint64_t expected = 0;
  for (int round = 0; round < 20; ++round) {
    SCOPED_TRACE(round);
    const uint64_t made = pair.fake->stats().queue_pairs;
    auto region = must(pair.b.worker->register_memory(pair.b.memory.data(), 4 << 20));
    TransferRequest doomed = pair.request(Op::kWrite, 4 << 20);
    doomed.remote = *pair.b.worker->remote_region(region);
    ASSERT_TRUE(pair.run(doomed).ok());  // the region is known now
    std::vector<TransferId> innocent;
    const auto count = [&] {
      for (int i = 0; i < 20; ++i) {
        TransferRequest one = pair.request(Op::kWrite, 100);
        one.counter = pair.b.worker->remote_counter(counter);
        innocent.push_back(*pair.a.worker->submit(one));
        ++expected;
      }
    };
    count();
    const TransferId id = *pair.a.worker->submit(doomed);
    count();
    pair.steps(3 + round);
    ASSERT_TRUE(pair.b.worker->deregister_memory(region).ok());
    EXPECT_THAT(pair.finish(id), fails_with(Code::kNotFound, {"stale"}));
    for (TransferId each : innocent) {
      EXPECT_EQ(pair.finish(each), absl::OkStatus());
    }
    pair.steps(100);
    EXPECT_EQ(pair.b.worker->counter_value(counter), expected);
    EXPECT_EQ(pair.fake->stats().queue_pairs, made + 2) << "one at each end";
    EXPECT_EQ(pair.a.worker->peer_state(pair.a.peer), PeerState::kUp);
  }
}

TEST_F(Faults, NothingThroughOnAnyRailFailsTheConnection) {
  VerbsPair pair({.devices = 1}, quick_);
  pair.fake->set_cable(0, false);
  auto peer = must(pair.a.worker->connect(pair.b.worker->address()));
  pair.until([&] { return pair.a.worker->peer_state(peer) == PeerState::kDown; });
  EXPECT_THAT(std::string(pair.a.worker->peer_status(peer).message()), HasSubstr("did not answer"));
}

}  // namespace
}  // namespace baton
