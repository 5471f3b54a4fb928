// Two shm providers in one process: what a rail moves, refuses, cancels and holds back.
#include "tests/fails_with.h"
#include "tests/shm/shm_node.h"
#include "tests/test.h"
#include "transport/shm/memory_file.h"
#include "transport/shm/slice_runner.h"

namespace baton::shm {
namespace {

using testing::HasSubstr;

constexpr size_t kBytes = 1 << 20;

// The memory under test comes from a pool (mapped) or not (CMA).
class ShmRail : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override { connect_nodes(a_, b_); }

  ShmNode a_{"a"};
  ShmNode b_{"b"};
};
INSTANTIATE_TEST_SUITE_P(Paths, ShmRail, testing::Values(true, false),
                         [](const auto& path) { return path.param ? "mapped" : "cma"; });

// A slice is copied in many chunks; those after the fence are not copied.
TEST_P(ShmRail, AFenceInTheMiddleOfASliceEndsIt) {
  constexpr size_t kLarge = 64 << 20;
  TestMemory source(kLarge, GetParam()), target(kLarge, GetParam());
  RegionEntry* entry = b_.add(target);
  until({&a_, &b_}, [&, rounds = 0]() mutable { return ++rounds > 100; });
  source.fill(5);
  target.fill(6);
  const Layout all = Layout::contiguous(0, kLarge);
  ASSERT_TRUE(a_.post(a_.transfer(Op::kWrite, source, all, b_.regions.describe(*entry), all)));
  until({&a_, &b_}, [&] { return target.all(5, 0, 1); });
  ASSERT_TRUE(a_.done.empty());
  EXPECT_TRUE(b_.remove(entry).ok());
  target.fill(6);
  until({&a_, &b_}, [&] { return !a_.done.empty(); });
  EXPECT_TRUE(absl::IsNotFound(a_.done[0].status)) << a_.done[0].status;
  EXPECT_TRUE(target.all(6));
}

// The segment of the only connection of this process, as its peer's side writes to it.
ConnectionSegment* connection_segment() {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("memfd:baton-connection") == std::string::npos) continue;
    return reinterpret_cast<ConnectionSegment*>(std::stoull(line, nullptr, 16));
  }
  return nullptr;
}

// Promise(memory): `deregister_memory()` is not OK while a stopped peer may go on with a copy | the
//   provider cuts that peer off (`shm.fence_ms`)
TEST(ShmFence, SaysThatAPeerIsStoppedInTheMiddleOfACopy) {
  ShmNode a("a"), b("b", {{"shm.fence_ms", "20"}});
  connect_nodes(a, b);
  TestMemory memory(kBytes, true);
  RegionEntry* entry = b.add(memory);
  ConnectionSegment* segment = connection_segment();
  ASSERT_NE(segment, nullptr);
  segment->from_client.busy.store(entry->index + 1);  // and there `a` stops
  EXPECT_THAT(b.remove(entry), fails_with(Code::kUnavailable, {"end that process"}));
  EXPECT_THAT(b.down, testing::Not(testing::IsEmpty()));  // it is cut off
}

// Promise(memory): Closing a connection whose peer is stopped in a copy waits 40 ms for it, and
//   `deregister_memory()` is not OK then either | the peer's mark stays while its connection is
//   closed and the region is taken away
TEST(ShmFence, KnowsOfACopyWhoseConnectionIsClosed) {
  ShmNode a("a"), b("b", {{"shm.fence_ms", "20"}});
  connect_nodes(a, b);
  TestMemory memory(kBytes, true), other(kBytes, true);
  RegionEntry* entry = b.add(memory);
  RegionEntry* unused = b.add(other);
  ConnectionSegment* segment = connection_segment();
  ASSERT_NE(segment, nullptr);
  segment->from_client.busy.store(entry->index + 1);  // and there `a` stops
  const Time began = Clock::steady().now();
  b.rails[0]->close(absl::CancelledError("going home"), b);
  EXPECT_LT(Clock::steady().now() - began, std::chrono::milliseconds(900)) << "a second, once";
  EXPECT_EQ(b.down.size(), 1u);
  EXPECT_EQ(b.remove(unused), absl::OkStatus());
  EXPECT_THAT(b.remove(entry), fails_with(Code::kUnavailable, {"end that process"}));
  // Another region may have its number now.
  EXPECT_EQ(b.remove(b.add(memory)), absl::OkStatus());
}

// Of many connections those that are silent are not looked at; their doorbells are.
// Promise(sleep): A round costs what there is to do, not the number of peers | peers, sockets and
//   connections with work are on lists
TEST(ShmMany, ALongSilentPeerStillWorks) {
  constexpr size_t kPeers = 24;
  ShmNode server("server");
  const auto address = must(server.provider->listen());
  std::vector<std::unique_ptr<ShmNode>> peers;
  for (size_t i = 0; i < kPeers; ++i) {
    peers.push_back(std::make_unique<ShmNode>("peer"));
    ShmNode& peer = *peers.back();
    peer.provider->connect({.session = i + 1, .address = address, .expected = server.self});
    until({&peer, &server}, [&] { return peer.rails.size() == 1 && server.rails.size() == i + 1; });
  }
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < (1 << 14) + 100; ++i) server.progress();
    for (size_t i = 0; i < kPeers; ++i) {
      const size_t heard = server.notes.size();
      ASSERT_TRUE(peers[i]->post(peers[i]->message("knock")));
      until({peers[i].get(), &server}, [&] {
        return server.notes.size() == heard + 1 && peers[i]->done.size() == size_t(round) + 1;
      });
    }
    for (int i = 0; i < (1 << 14) + 100; ++i) server.progress();
    const TransferDescriptor& news = server.message("come in");
    ASSERT_TRUE(server.rails[7]->post({&news, 0, 0, 0}, server));
    until({peers[7].get(), &server}, [&] {
      return peers[7]->notes.size() == size_t(round) + 1 && server.done.size() == size_t(round) + 1;
    });
  }
  // One that goes is noticed, too.
  for (int i = 0; i < (1 << 14) + 100; ++i) server.progress();
  peers.erase(peers.begin() + 3);
  until({&server}, [&] { return server.rails.size() == kPeers - 1; });
}

TEST_P(ShmRail, AFullRingHoldsBackAndLosesNothing) {
  constexpr int kMessages = 300;
  const std::string filler(4000, 'x');
  int posted = 0;
  // Nobody reads at b: some of them fill the ring, the rest stay with a.
  for (bool any = true; any;) {
    any = false;
    while (posted < kMessages && a_.post(a_.message(std::to_string(posted) + filler))) ++posted;
    any = a_.progress();
  }
  const size_t in_ring = a_.done.size();
  EXPECT_EQ(in_ring, Lane::kRingBytes / (8 + 48 + 4008));
  EXPECT_LT(posted, kMessages);
  until({&a_, &b_}, [&] {
    while (posted < kMessages && a_.post(a_.message(std::to_string(posted) + filler))) ++posted;
    return b_.notes.size() == kMessages;
  });
  for (int i = 0; i < kMessages; ++i) EXPECT_EQ(b_.notes[i], std::to_string(i) + filler);
}

// One side is up before the other. What it delivered then was lost, and called done, when the
// connection was cut before the other one had taken it.
// Promise(lost): Over shm nothing is done before the target has the connection | the target opens
//   its lane at that time
TEST(ShmEarly, NothingIsDeliveredBeforeThePeerHasTheConnection) {
  ShmNode client("client"), server("server");
  const auto address = must(server.provider->listen());
  client.provider->connect({.session = 1, .address = address, .expected = server.self});
  until([&] { return !server.rails.empty() || !client.rails.empty(); },
        [&] {
          if (client.progress(), client.rails.empty()) server.progress();
        });
  ShmNode& early = server.rails.empty() ? client : server;
  ShmNode& late = server.rails.empty() ? server : client;
  ASSERT_TRUE(early.post(early.message("hello")));
  for (int round = 0; round < 100; ++round) early.progress();
  EXPECT_TRUE(early.done.empty()) << "nobody has it";
  ASSERT_TRUE(late.rails.empty());
  until({&early, &late}, [&] { return !early.done.empty(); });
  EXPECT_TRUE(early.done[0].status.ok()) << early.done[0].status;
  until({&early, &late}, [&] { return !late.notes.empty(); });
  EXPECT_EQ(late.notes[0], "hello");
}

TEST(ShmProvider, SaysWhatStandsInTheWayWithoutCma) {
  ShmNode a("a", {{"shm.cma", "off"}});
  ShmNode b("b");
  connect_nodes(a, b);
  TestMemory heap(4096, false);
  TestMemory pool(4096, true);
  const RemoteRegion remote = b.share(heap);
  const absl::Status status = a.rails[0]->reaches(remote);
  EXPECT_THAT(status, fails_with(Code::kFailedPrecondition, {"shm.cma=off", "MemoryPool"}));
  EXPECT_TRUE(a.rails[0]->reaches(b.share(pool)).ok());

  const Layout page = Layout::contiguous(0, 4096);
  ASSERT_TRUE(a.post(a.transfer(Op::kWrite, heap, page, remote, page)));
  until({&a, &b}, [&] { return !a.done.empty(); });
  EXPECT_TRUE(absl::IsFailedPrecondition(a.done[0].status)) << a.done[0].status;
}

TEST(ShmProvider, SaysWhyItIsNotAvailable) {
  ShmNode a("a", {{"shm.memfd", "off"}});
  EXPECT_FALSE(a.provider->capabilities().available);
  EXPECT_THAT(a.provider->capabilities().detail, HasSubstr("memfd"));
  EXPECT_FALSE(a.provider->listen().ok());
  EXPECT_FALSE(a.provider->reachable("baton-x", "here").ok());
  a.provider->connect({.session = 1, .address = "baton-x"});
  until({&a}, [&] { return !a.failed.ok(); });
}

TEST(ShmProvider, ReachesOnlyThisMachine) {
  ShmNode a("a");
  EXPECT_TRUE(a.provider->reachable("baton-x", "here").ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(a.provider->reachable("baton-x", "elsewhere")));
  EXPECT_FALSE(a.provider->reachable("127.0.0.1:80", "here").ok());
}

}  // namespace
}  // namespace baton::shm
