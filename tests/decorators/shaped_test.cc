// A shaped link delivers at exactly the time that its bandwidth and latency say. In virtual time,
// over a simulated fabric that takes no time itself.
#include "tests/sim/cluster.h"
#include "tests/test.h"
#include "transport/decorators.h"

namespace baton {
using namespace sim;
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::HasSubstr;
using testing::IsEmpty;

struct ShapedTest : testing::Test {
  static constexpr size_t kBytes = 8 << 20;

  // Node 0's link is shaped; the others' are not.
  void make(LinkShape shape, SimOptions options = {}) {
    options.link.bytes_per_second = 0;
    options.link.latency = Time(0);
    cluster.emplace(options, kBytes);
    cluster->stop(0);
    auto worker = Worker::create({.name = "shaped",
                                  .key = test_key(),
                                  .clock = &cluster->fabric.clock(),
                                  .shape = shape,
                                  .settings = {{"peer.redial_ms", "5000"}},
                                  .extra_providers = {cluster->fabric.provider_factory(0)}});
    ASSERT_TRUE(worker.ok()) << worker.status();
    auto& member = cluster->members[0];
    member.worker = *std::move(worker);
    member.region = *member.worker->register_memory(member.memory.data(), kBytes);
    member.remote = *member.worker->remote_region(member.region);
    cluster->fabric.attach(*member.worker, 0);
    peer = cluster->connect(0, 1).first;
    start = cluster->fabric.clock().now();
  }
  TransferId submit(Op op, size_t bytes) { return submit(cluster->request(op, 0, peer, 1, bytes)); }
  TransferId submit(const TransferRequest& request) {
    return cluster->worker(0).submit(request).value();
  }
  // When the transfer ends, since start.
  Time end_of(TransferId id) {
    EXPECT_TRUE(cluster->run_to_end(0, id, seconds(1000)));
    return now();
  }
  Time now() { return cluster->fabric.clock().now() - start; }
  absl::Status status(TransferId id) { return cluster->worker(0).status(id); }

  std::optional<SimCluster> cluster;
  PeerId peer;
  Time start{};
};

TEST_F(ShapedTest, ATransferEndsWhenItsLastByteHasLeftPlusTheLatency) {
  make({.bytes_per_second = 40e6, .latency = microseconds(200)});
  EXPECT_EQ(end_of(submit(Op::kWrite, 1'000'000)), milliseconds(25) + microseconds(200));
  start = cluster->fabric.clock().now();
  EXPECT_EQ(end_of(submit(Op::kRead, 3'000'000)), milliseconds(75) + microseconds(200));
  EXPECT_THAT(cluster->fabric.violations(), IsEmpty());
}

TEST_F(ShapedTest, BytesArriveAsTheyLeaveAndNotBefore) {
  make({.bytes_per_second = 10e6, .latency = milliseconds(3)});
  std::fill(cluster->members[0].memory.begin(), cluster->members[0].memory.end(), std::byte{1});
  CounterId counter = *cluster->worker(1).allocate_counter();
  TransferRequest request = cluster->request(Op::kWrite, 0, peer, 1, 1'000'000);
  request.counter = cluster->worker(1).remote_counter(counter);
  const TransferId id = submit(request);
  const auto& there = cluster->members[1].memory;
  for (int ms = 1; ms <= 102; ++ms) {
    cluster->fabric.run_for(start + milliseconds(ms) - cluster->fabric.clock().now());
    const auto arrived = std::count(there.begin(), there.begin() + 1'100'000, std::byte{1});
    EXPECT_EQ(arrived, std::max(0, ms - 3) * 10'000) << ms;  // a slice is a millisecond
    EXPECT_EQ(cluster->worker(1).counter_value(counter), 0u);
  }
  EXPECT_EQ(end_of(id), milliseconds(103));
  cluster->fabric.run_for(Time(1));
  EXPECT_EQ(cluster->worker(1).counter_value(counter), 1u);
}

TEST_F(ShapedTest, TransfersAndPeersShareTheLinkDirectionsDoNot) {
  make({.bytes_per_second = 100e6}, {.nodes = 3, .rails = 2});
  const PeerId other = cluster->connect(0, 2).first;
  start = cluster->fabric.clock().now();
  const TransferId a = submit(Op::kWrite, 1'000'000);
  const TransferId b = submit(cluster->request(Op::kWrite, 0, other, 2, 1'000'000));
  const TransferId c = submit(Op::kRead, 1'000'000);
  EXPECT_EQ(end_of(c), milliseconds(10));
  EXPECT_EQ(std::max(end_of(a), end_of(b)), milliseconds(20));
}

TEST_F(ShapedTest, LatencyIsPaidOnceByMessagesOnTheirWayTogether) {
  make({.bytes_per_second = 1e9, .latency = milliseconds(50)});
  std::vector<TransferId> ids;
  for (int i = 0; i < 200; ++i) ids.push_back(submit(Op::kWrite, 1000));
  for (int i = 0; i < 200; ++i) {
    EXPECT_EQ(end_of(ids[static_cast<size_t>(i)]), milliseconds(50) + microseconds(i + 1));
  }
}

TEST_F(ShapedTest, SmallMessagesPassBulkButDoNotInterruptASlice) {
  make({.bytes_per_second = 1e6});
  const TransferId bulk = submit(Op::kWrite, 1'000'000);
  cluster->fabric.run_for(milliseconds(10));  // slices are 4096 bytes: the third is on the link
  const TransferId small = submit(Op::kWrite, 1000);
  EXPECT_EQ(end_of(small), microseconds(3 * 4096) + milliseconds(1));
  EXPECT_EQ(end_of(bulk), milliseconds(1001));
}

TEST_F(ShapedTest, BulkGoesOnThoughSmallMessagesFillTheLink) {
  make({.bytes_per_second = 1e9});
  const TransferId bulk = submit(Op::kWrite, 4 << 20);
  std::deque<TransferId> small;
  for (size_t sent = 0; !ended(*cluster->worker(0).state(bulk)); sent += 4096) {
    ASSERT_LT(sent, 16 * (4u << 20)) << "it waits for the end of them";
    while (small.size() < 64) small.push_back(submit(Op::kWrite, 4096));
    ASSERT_TRUE(cluster->run_to_end(0, small.front(), seconds(1000)));
    ASSERT_TRUE(cluster->worker(0).release(small.front()).ok());
    small.pop_front();
  }
  EXPECT_TRUE(status(bulk).ok());
}

TEST_F(ShapedTest, ACancelledTransferEndsAtOnceAndGivesItsTimeBack) {
  make({.bytes_per_second = 1e6, .latency = milliseconds(1)});
  const TransferId first = submit(Op::kWrite, 500'000);
  cluster->fabric.run_for(milliseconds(100));
  const TransferId second = submit(Op::kWrite, 200'000);
  const std::vector<std::byte> before = cluster->members[1].memory;
  ASSERT_TRUE(cluster->worker(0).cancel(first).ok());
  EXPECT_EQ(end_of(first), milliseconds(100));
  EXPECT_EQ(*cluster->worker(0).state(first), TransferState::kCancelled);
  EXPECT_EQ(end_of(second), milliseconds(301));
  EXPECT_TRUE(status(second).ok());
}

TEST_F(ShapedTest, ProvidersThatTakeWholeTransfersGetThemAtTheEnd) {
  make({.bytes_per_second = 10e6, .latency = milliseconds(1)}, {.slice_bytes = SIZE_MAX});
  std::fill(cluster->members[0].memory.begin(), cluster->members[0].memory.end(), std::byte{1});
  const TransferId id = submit(Op::kWrite, 1'000'000);
  cluster->fabric.run_for(milliseconds(100));
  EXPECT_EQ(std::count(cluster->members[1].memory.begin(), cluster->members[1].memory.end(),
                       std::byte{1}),
            0);
  EXPECT_EQ(end_of(id), milliseconds(101));
  EXPECT_EQ(cluster->worker(0).stats().slices_posted, 1u);
}

TEST_F(ShapedTest, AFullInnerRailOnlyDelays) {
  make({.bytes_per_second = 1e9}, {.queue_depth = 1, .slice_bytes = 4096, .rail_depth = 1});
  std::vector<TransferId> ids;
  for (int i = 0; i < 100; ++i) ids.push_back(submit(Op::kWrite, 100'000));
  for (TransferId id : ids) {
    end_of(id);
    EXPECT_TRUE(status(id).ok());
  }
  EXPECT_EQ(now(), milliseconds(10));
}

TEST_F(ShapedTest, ALostPeerFailsWhatWaitsForTheLink) {
  make({.bytes_per_second = 1e6}, {.rails = 2});
  std::vector<TransferId> ids;
  for (int i = 0; i < 10; ++i) ids.push_back(submit(Op::kWrite, 1'000'000));
  cluster->fabric.kill(1, start + milliseconds(500));
  for (TransferId id : ids) {
    EXPECT_LE(end_of(id), milliseconds(550) + seconds(5));  // peer.redial_ms
    EXPECT_EQ(status(id).code(), absl::StatusCode::kUnavailable);
  }
  EXPECT_EQ(cluster->worker(0).peer_state(peer), PeerState::kDown);
  EXPECT_THAT(cluster->fabric.violations(), IsEmpty());
}

TEST_F(ShapedTest, AnUnlimitedLinkAddsNothing) {
  make({});
  EXPECT_EQ(end_of(submit(Op::kWrite, 8 << 20)), Time(0));
}

TEST_F(ShapedTest, TheRouteSaysSo) {
  make({.bytes_per_second = 40e6, .latency = microseconds(200)});
  EXPECT_THAT(cluster->worker(0).explain(peer), HasSubstr("shaped to 40 MB/s, 200 us"));
}

TEST(LinkShape, ParsesWhatPeopleWrite) {
  const auto shape = [](std::string_view text) {
    auto parsed = LinkShape::parse(text).value();
    return std::make_pair(parsed.bytes_per_second, parsed.latency);
  };
  EXPECT_EQ(shape("40MB/s"), std::make_pair(40e6, Time(0)));
  EXPECT_EQ(shape("10Gb/s"), std::make_pair(1.25e9, Time(0)));
  EXPECT_EQ(shape("40MB/s,200us"), std::make_pair(40e6, Time(microseconds(200))));
  EXPECT_EQ(shape("1.5 GB/s, 0.5ms"), std::make_pair(1.5e9, Time(microseconds(500))));
  EXPECT_EQ(shape("5ms"), std::make_pair(0.0, Time(milliseconds(5))));
  for (std::string_view bad :
       {"", "40", "MB/s", "40MB", "-1MB/s", "0MB/s", "nanMB/s", "infMB/s", "40MB/s,",
        "40MB/s,40MB/s", "1ms,1ms", "40MB/s,200us,1", "99999999999s", "40MB/s 200us"}) {
    EXPECT_EQ(LinkShape::parse(bad).status().code(), absl::StatusCode::kInvalidArgument) << bad;
  }
  EXPECT_THAT(std::string(LinkShape::parse("fast").status().message()), HasSubstr("40MB/s,200us"));
}

}  // namespace
}  // namespace baton
