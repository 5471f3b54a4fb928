// Queue pairs connected by rdma_cm: that they are, by whom, what is said when they cannot be, and
// that rails come back the same way.
#include "tests/verbs/verbs_pair.h"

namespace baton {
namespace {

using testing::AllOf;
using testing::HasSubstr;

VerbsPair::Settings with_cm(VerbsPair::Settings more = {}) {
  VerbsPair::Settings settings = {{"verbs.rdma_cm", "1"},    {"verbs.timeout", "8"},
                                  {"verbs.hold_ms", "20"},   {"verbs.stall_ms", "50"},
                                  {"verbs.settle_ms", "50"}, {"verbs.connect_ms", "100"}};
  settings.insert(settings.end(), more.begin(), more.end());
  return settings;
}

bool both_carry(VerbsPair& pair) {
  const uint64_t before[] = {pair.fake->moved(0), pair.fake->moved(1)};
  EXPECT_TRUE(pair.run(pair.request(Op::kWrite)).ok());
  const size_t least = VerbsPair::kBytes / 4;
  return pair.fake->moved(0) - before[0] >= least && pair.fake->moved(1) - before[1] >= least;
}

TEST(ConnectionManager, ConnectsEveryRail) {
  VerbsPair pair({.devices = 2}, with_cm({{"verbs.qps", "2"}}));
  pair.connect();
  EXPECT_EQ(pair.cm->established(), 4u);
  EXPECT_THAT(pair.a.worker->explain(pair.a.peer), HasSubstr("by rdma_cm"));
  EXPECT_THAT(pair.a.worker->explain(pair.a.peer),
              testing::ContainsRegex("local LID 0000 QPN 0x[0-9a-f]+ PSN 0x[0-9a-f]+ GID 10.0.1.1, "
                                     "remote LID 0000 QPN 0x[0-9a-f]+ PSN"));
  pair.fill(1);
  EXPECT_TRUE(pair.run(pair.request(Op::kWrite)).ok());
  EXPECT_TRUE(pair.a.memory == pair.b.memory);
  EXPECT_TRUE(pair.run(pair.request(Op::kRead)).ok());
}

TEST(ConnectionManager, TheFlagOfTheCallingSideIsEnough) {
  VerbsPair pair({});
  pair.connect();
  EXPECT_EQ(pair.cm->established(), 0u);
  WorkerOptions options;
  options.key = *ClusterKey::from_bytes("a secret of the tests");
  options.clock = &pair.clock;
  options.settings = with_cm();
  options.extra_providers = {verbs::verbs_over(pair.fake->api(), &pair.cm->api())};
  auto other = Worker::create(options);
  ASSERT_TRUE(other.ok());
  auto peer = (*other)->connect(pair.b.worker->address());
  ASSERT_TRUE(peer.ok());
  pair.until([&] {
    (*other)->progress();
    return (*other)->peer_state(*peer) == PeerState::kUp;
  });
  EXPECT_EQ(pair.cm->established(), 1u);
}

TEST(ConnectionManager, ARailThatBrokeComesBackByIt) {
  VerbsPair pair({.devices = 2}, with_cm());
  pair.connect();
  EXPECT_TRUE(both_carry(pair));
  const TransferId id = *pair.a.worker->submit(pair.request(Op::kWrite));
  pair.steps(5);
  pair.fake->set_port(1, false);
  EXPECT_TRUE(pair.finish(id).ok());
  EXPECT_FALSE(both_carry(pair));
  pair.fake->set_port(1, true);
  pair.steps(10'000);
  EXPECT_TRUE(both_carry(pair)) << "the rail did not come back";
  EXPECT_EQ(pair.cm->established(), 3u);
  EXPECT_FALSE(pair.cm->deaf(1));
}

TEST(ConnectionManager, ARefusedAccessRecoversByIt) {
  VerbsPair pair({}, with_cm());
  pair.connect();
  auto region = pair.b.worker->register_memory(pair.b.memory.data(), 4 << 20);
  ASSERT_TRUE(region.ok());
  TransferRequest doomed = pair.request(Op::kWrite, 4 << 20);
  doomed.remote = *pair.b.worker->remote_region(*region);
  ASSERT_TRUE(pair.run(doomed).ok());
  const TransferId id = *pair.a.worker->submit(doomed);
  pair.steps(4);
  ASSERT_TRUE(pair.b.worker->deregister_memory(*region).ok());
  EXPECT_TRUE(absl::IsNotFound(pair.finish(id)));
  EXPECT_TRUE(pair.run(pair.request(Op::kWrite)).ok());
  EXPECT_EQ(pair.a.worker->peer_state(pair.a.peer), PeerState::kUp);
  EXPECT_EQ(pair.cm->established(), 2u);
}

TEST(ConnectionManager, APeerThatDisconnectsCostsTheQueuePairsOnly) {
  VerbsPair pair({.devices = 2}, with_cm());
  pair.connect();
  pair.fill(2);
  const TransferId id = *pair.a.worker->submit(pair.request(Op::kWrite));
  pair.steps(5);
  pair.cm->disconnect_all();
  const absl::Status status = pair.finish(id);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_TRUE(pair.a.memory == pair.b.memory);
  pair.steps(10'000);
  EXPECT_TRUE(both_carry(pair));
}

TEST(ConnectionManager, ADeviceThatIsRemovedLeavesItsWorkToOthers) {
  VerbsPair pair({.devices = 2}, with_cm());
  pair.connect();
  pair.fill(3);
  const TransferId id = *pair.a.worker->submit(pair.request(Op::kWrite));
  pair.steps(5);
  pair.cm->remove_device(0);
  const absl::Status status = pair.finish(id);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_TRUE(pair.a.memory == pair.b.memory);
  pair.steps(10'000);
  EXPECT_FALSE(both_carry(pair));
}

TEST(ConnectionManager, SaysWhyItCannotConnect) {
  struct Case {
    std::function<void(FakeCm&)> fault;
    const char* message;
  };
  for (const Case& each : {
           Case{[](FakeCm& cm) { cm.missing = true; }, "modprobe rdma_ucm"},
           Case{[](FakeCm& cm) { cm.unroutable = true; }, "rdma_cm finds no route from fake0:1"},
           Case{[](FakeCm& cm) { cm.silent = true; }, "did not join the two queue pairs in time"},
           Case{[](FakeCm& cm) { cm.nobody_listens = true; }, "no process listens there"},
           Case{[](FakeCm& cm) { cm.impostor = true; }, "another machine answers"},
       }) {
    SCOPED_TRACE(each.message);
    VerbsPair pair({}, with_cm());
    each.fault(*pair.cm);
    EXPECT_THAT(pair.refusal(), HasSubstr(each.message));
    // Both sides go on, and a later attempt succeeds.
    pair.cm->missing = pair.cm->unroutable = pair.cm->silent = pair.cm->nobody_listens =
        pair.cm->impostor = false;
    pair.connect();
    EXPECT_TRUE(pair.run(pair.request(Op::kWrite)).ok());
  }
}

TEST(ConnectionManager, ARouteByAnotherDeviceIsRefused) {
  VerbsPair pair({.devices = 2}, with_cm({{"verbs.devices", "fake0"}}));
  pair.cm->wrong_device = 1;
  EXPECT_THAT(pair.refusal(), AllOf(HasSubstr("rdma_cm chose fake1:1 instead of fake0:1"),
                                    HasSubstr("different subnets")));
}

// (/sys/kernel/config/rdma_cm/DEVICE/ports/PORT/default_roce_tos)
TEST(ConnectionManager, TheTrafficClassOfTheFabricStandsUnlessOneIsGiven) {
  for (const uint8_t given : {0, 40}) {
    VerbsPair pair({}, with_cm({{"verbs.traffic_class", std::to_string(given)}}));
    pair.cm->traffic_class = 104;
    pair.connect();
    const auto addresses = pair.fake->addresses();
    ASSERT_EQ(addresses.size(), 2u);
    for (const ibv_ah_attr& each : addresses) {
      EXPECT_EQ(each.grh.traffic_class, given != 0 ? given : 104);
    }
  }
}

TEST(ConnectionManager, StrangersAreRejected) {
  VerbsPair pair({}, with_cm());
  pair.connect();
  pair.cm->call_from_stranger("");
  pair.cm->call_from_stranger("GET / HTTP/1.0");
  pair.cm->call_from_stranger(std::string("BCM\x01", 4) + std::string(32, 'x'));
  pair.cm->call_from_stranger(std::string("BCM\x01", 4) + std::string(52, '\0'));
  pair.steps(100);
  EXPECT_EQ(pair.cm->rejected(), 4u);
  EXPECT_THAT(pair.cm->last_rejection(), HasSubstr("no connection here expects this call"));
  EXPECT_TRUE(pair.run(pair.request(Op::kWrite)).ok());
}

TEST(ConnectionManager, AStrangerDoesNotTakeTheRailThatIsAwaited) {
  VerbsPair pair({}, with_cm());
  auto peer = pair.a.worker->connect(pair.b.worker->address());
  ASSERT_TRUE(peer.ok());
  // All along while the two meet.
  for (int i = 0; i < 400; ++i) {
    pair.cm->call_from_stranger(std::string("BCM\x01", 4) + std::string(32, 'x'));
    pair.step();
  }
  EXPECT_EQ(pair.a.worker->peer_state(*peer), PeerState::kUp);
  EXPECT_EQ(pair.cm->established(), 1u);
}

}  // namespace
}  // namespace baton
