// Faults at each place, one after the other: every acknowledgement is the first that is lost, with
// its link or with all of them; and programs that stand still, or leave.
#include "tests/sim/cluster.h"
#include "tests/test.h"

namespace baton::sim {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr size_t kBlock = 8 << 10;
constexpr size_t kTransfers = 6;
constexpr std::byte kReused{0xcc};

std::byte pattern(size_t transfer, size_t at) {
  return std::byte((transfer * 17 + at * 7 + (at >> 8) * 3) & 127);
}

// Writes of both nodes to each other, of several slices each. A target that is told uses the block
// for something else.
class Exchange {
 public:
  explicit Exchange(const SimOptions& options) : cluster(options, 2 * kTransfers * kBlock) {
    std::tie(peers[0], peers[1]) = cluster.connect(0, 1);
    for (size_t i = 0; i < kTransfers; ++i) {
      for (size_t at = 0; at < kBlock; ++at) source(i)[at] = pattern(i, at);
      counters[i] = *cluster.worker(1 - from(i)).allocate_counter();
    }
  }
  static size_t from(size_t number) { return number % 3 == 2 ? 1 : 0; }
  std::byte* source(size_t number) {
    return cluster.members[from(number)].memory.data() + number * kBlock;
  }
  std::byte* target(size_t number) {
    return cluster.members[1 - from(number)].memory.data() + (kTransfers + number) * kBlock;
  }

  void submit_all() {
    for (size_t i = 0; i < kTransfers; ++i) {
      const size_t to = 1 - from(i);
      const std::string notify = std::to_string(i);
      TransferRequest request = cluster.request(Op::kWrite, from(i), peers[from(i)], to, kBlock);
      request.local_layout = Layout::contiguous(i * kBlock, kBlock);
      request.remote_layout = Layout::contiguous((kTransfers + i) * kBlock, kBlock);
      request.counter = cluster.worker(to).remote_counter(counters[i]);
      request.notify = notify;
      ids[i] = *cluster.worker(from(i)).submit(request);
    }
  }
  bool run() {
    const bool over = cluster.fabric.run_until(
        [&] {
          hear();
          for (size_t i = 0; i < kTransfers; ++i) {
            if (!ended(*cluster.worker(from(i)).state(ids[i]))) return false;
          }
          return true;
        },
        seconds(30));
    cluster.fabric.run_for(milliseconds(20));
    hear();
    return over;
  }
  void hear() {
    for (size_t node = 0; node < 2; ++node) {
      while (cluster.worker(node).next_notification(got)) {
        const size_t number = std::stoul(got.payload);
        ++told[number];
        for (size_t at = 0; at < kBlock; ++at) {
          if (target(number)[at] != pattern(number, at)) FAIL() << number << " at " << at;
        }
        std::fill_n(target(number), kBlock, kReused);
      }
    }
  }
  void expect_exact() {
    for (size_t i = 0; i < kTransfers; ++i) {
      SCOPED_TRACE(testing::Message() << "transfer " << i);
      EXPECT_EQ(cluster.worker(from(i)).status(ids[i]), absl::OkStatus());
      EXPECT_EQ(told[i], 1);
      EXPECT_EQ(cluster.worker(1 - from(i)).counter_value(counters[i]), 1u);
      EXPECT_EQ(std::count(target(i), target(i) + kBlock, kReused), static_cast<ptrdiff_t>(kBlock))
          << "bytes landed in memory that had been reused";
    }
    EXPECT_THAT(cluster.fabric.violations(), IsEmpty());
  }
  WorkerStats stats() {
    WorkerStats sum = cluster.worker(0).stats();
    const WorkerStats other = cluster.worker(1).stats();
    sum.receipts += other.receipts;
    sum.slices_moved += other.slices_moved;
    sum.rails_lost += other.rails_lost;
    sum.peers_resumed += other.peers_resumed;
    return sum;
  }

  SimCluster cluster;
  PeerId peers[2];
  std::array<CounterId, kTransfers> counters;
  std::array<TransferId, kTransfers> ids;
  std::array<int, kTransfers> told{};
  Notification got;
};

struct Case {
  const char* name;
  size_t rails;
  bool all;     // links go together
  bool freeze;  // the target's program stands still meanwhile
};

class EachAcknowledgement : public testing::TestWithParam<Case> {};

TEST_P(EachAcknowledgement, MayBeTheFirstThatIsLost) {
  const Case& which = GetParam();
  const SimOptions options{.rails = which.rails,
                           .link = {.bytes_per_second = 1e9, .latency = microseconds(2)},
                           .mtu = 1024,
                           .slice_bytes = 2048};
  uint64_t boundaries = 0, receipts = 0, moved = 0, resumed = 0;
  // The last round loses none: there are no more.
  for (uint64_t lost = 0; lost <= boundaries; ++lost) {
    SCOPED_TRACE(testing::Message() << "acknowledgement " << lost);
    Exchange exchange(options);
    SimFabric& fabric = exchange.cluster.fabric;
    uint64_t sent = 0;
    bool cut = false;
    fabric.before_each_ack([&](uint64_t, size_t from, size_t to, size_t rail) {
      if (sent++ != lost) return;
      cut = true;
      // Long enough for the adapters to give up.
      const Time until = fabric.clock().now() + milliseconds(8);
      for (size_t each = 0; each < which.rails; ++each) {
        if (which.all || each == rail) fabric.cut(from, to, each, until);
      }
      if (which.freeze) fabric.freeze(from, fabric.clock().now(), until + milliseconds(5));
    });
    exchange.submit_all();
    ASSERT_TRUE(exchange.run());
    exchange.expect_exact();
    if (testing::Test::HasFailure()) return;
    const WorkerStats stats = exchange.stats();
    receipts += stats.receipts;
    moved += stats.slices_moved;
    resumed += stats.peers_resumed;
    if (cut) boundaries = lost + 1;
  }
  EXPECT_GE(boundaries, kTransfers * kBlock / options.slice_bytes);
  EXPECT_GT(receipts, 0u);
  EXPECT_GT(moved, 0u);
  if (which.all) {
    EXPECT_GT(resumed, 0u);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Links, EachAcknowledgement,
    testing::Values(Case{"One", 1, true, false}, Case{"OneOfTwo", 2, false, false},
                    Case{"OneOfThree", 3, false, false}, Case{"BothOfTwo", 2, true, false},
                    Case{"OneOfTwoFrozen", 2, false, true}, Case{"BothOfTwoFrozen", 2, true, true}),
    [](const auto& of) { return of.param.name; });

// Its adapter acknowledges, and its connections stay: what came is seen when it goes on.
// Promise(lost): A stopped program loses nothing: what arrived counts when it continues | only time
//   in which the peer could answer counts
TEST(Frozen, APeerLosesNothing) {
  Exchange exchange({.rails = 2, .slice_bytes = 2048});
  SimFabric& fabric = exchange.cluster.fabric;
  const Time start = fabric.clock().now();
  fabric.freeze(1, start, start + seconds(20));
  exchange.submit_all();
  Worker& worker = exchange.cluster.worker(0);
  ASSERT_TRUE(exchange.cluster.run_to_end(0, exchange.ids[0]));
  EXPECT_LT(fabric.clock().now(), start + seconds(1));
  EXPECT_EQ(exchange.cluster.worker(1).counter_value(exchange.counters[0]), 0u);
  fabric.run_for(seconds(10));
  EXPECT_EQ(worker.peer_state(exchange.peers[0]), PeerState::kUp);
  ASSERT_TRUE(exchange.run());
  exchange.expect_exact();
  EXPECT_EQ(exchange.stats().rails_lost + worker.stats().peers_lost, 0u);
}

// One rail hears the goodbye while it carries something; by the link of the other, which is quiet,
// it does not come. Nobody sends anything by that who does not have to.
// Promise(disconnect): A peer that leaves while one rail's link is down keeps nothing waiting | the
//   question goes over the rail that is left
TEST(Goodbye, ALostGoodbyeOnAQuietRailDelaysNoPeer) {
  Exchange exchange({.rails = 2, .link = {.latency = microseconds(50)}});
  SimCluster& cluster = exchange.cluster;
  SimFabric& fabric = cluster.fabric;
  TransferRequest request = cluster.request(Op::kWrite, 0, exchange.peers[0], 1, 100);
  request.notify = "are you there?";
  const TransferId id = *cluster.worker(0).submit(request);
  fabric.run_for(microseconds(10));  // it is on its way
  fabric.cut(0, 1, 1, fabric.clock().now() + milliseconds(2));
  cluster.stop(1);
  ASSERT_TRUE(cluster.run_to_end(0, id, seconds(1)));
  EXPECT_TRUE(absl::IsUnavailable(cluster.worker(0).status(id))) << cluster.worker(0).status(id);
  EXPECT_THAT(std::string(cluster.worker(0).status(id).message()),
              HasSubstr("closed the connection"));
  EXPECT_EQ(cluster.worker(0).peer_state(exchange.peers[0]), PeerState::kDown);
}

}  // namespace
}  // namespace baton::sim
