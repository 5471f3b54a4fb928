// The simulated queue pair keeps the rules of a real one: exact times, order, refusals, flushes,
// retries.
#include "tests/sim/fabric/queue_pair.h"

#include "tests/sim/fabric/fabric.h"
#include "tests/sim/fabric/network.h"
#include "tests/test.h"

namespace baton::sim {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr size_t kMemory = 1 << 20;

// One end of a connection: memory, its registration, and what the queue pair reported.
struct End final : QueuePairOwner {
  struct Completion {
    uint64_t id;
    absl::Status status;
    bool flushed;
    Time at;
  };

  End(SimFabric& owner, size_t node, size_t peer, Access access = Access::kRemoteReadWrite)
      : fabric(owner),
        table(WorkerUid::random()),
        memory(kMemory),
        entry(**table.add(memory.data(), memory.size(), access, {})),
        queue_pair(owner.network(), node, peer, 0, table, *this) {}

  void completed(uint64_t id, const absl::Status& status, bool flushed) override {
    completions.push_back({id, status, flushed, fabric.clock().now()});
  }
  void landed(const Arrival& arrival) override { arrivals.push_back(arrival.slice); }
  void broken(const absl::Status& cause, Break how) override {
    breaks.push_back(how);
    why = cause;
  }
  void recovered() override { ++recoveries; }

  std::vector<uint64_t> ids() const {
    std::vector<uint64_t> out;
    for (const Completion& completion : completions) out.push_back(completion.id);
    return out;
  }

  SimFabric& fabric;
  RegionTable table;
  std::vector<std::byte> memory;
  RegionEntry entry;
  QueuePair queue_pair;
  std::vector<Completion> completions;
  std::vector<uint32_t> arrivals;
  std::vector<Break> breaks;
  absl::Status why;
  int recoveries = 0;
};

// A transfer of `bytes` from offset 0 to offset 0.
TransferDescriptor between(const End& local, const End& remote, Op op, size_t bytes) {
  return {.id = {1, 1},
          .op = op,
          .local_base = local.entry.base,
          .local_region = local.entry.index,
          .local = Layout::contiguous(0, bytes),
          .remote = remote.table.describe(remote.entry),
          .remote_layout = Layout::contiguous(0, bytes),
          .bytes = bytes};
}

WorkRequest request(uint64_t id, const TransferDescriptor& transfer, size_t begin, size_t end) {
  return {.id = id,
          .op = transfer.op == Op::kWrite ? WorkRequest::Op::kWrite : WorkRequest::Op::kRead,
          .transfer = &transfer,
          .slice = static_cast<uint32_t>(id),
          .begin = begin,
          .end = end};
}
WorkRequest whole(uint64_t id, const TransferDescriptor& transfer) {
  return request(id, transfer, 0, transfer.bytes);
}

void fill(std::vector<std::byte>& memory, unsigned seed) {
  for (size_t i = 0; i < memory.size(); ++i)
    memory[i] = std::byte((i * 31 + seed + (i >> 8)) & 255);
}

struct QueuePairTest : testing::Test {
  void make(SimOptions options) {
    fabric.emplace(options);
    a.emplace(*fabric, 0, 1);
    b.emplace(*fabric, 1, 0);
    QueuePair::join(a->queue_pair, b->queue_pair);
    fill(a->memory, 1);
    fill(b->memory, 2);
  }
  std::optional<SimFabric> fabric;
  std::optional<End> a;
  std::optional<End> b;
};

TEST_F(QueuePairTest, AWriteTakesItsBytesOverTheBandwidthAndTwoLatencies) {
  make({.link = {.bytes_per_second = 1e9, .latency = microseconds(7)}});
  const TransferDescriptor transfer = between(*a, *b, Op::kWrite, 1'000'000);
  ASSERT_TRUE(a->queue_pair.post(whole(9, transfer)).ok());
  fabric->run_for(milliseconds(10));
  ASSERT_THAT(a->ids(), ElementsAre(9));
  EXPECT_EQ(a->completions[0].at, milliseconds(1) + 2 * microseconds(7));
  EXPECT_TRUE(std::equal(a->memory.begin(), a->memory.begin() + 1'000'000, b->memory.begin()));
  EXPECT_THAT(fabric->violations(), IsEmpty());
}

TEST_F(QueuePairTest, AReadTakesAsLong) {
  make({.link = {.bytes_per_second = 3e9, .latency = microseconds(5)}});
  const TransferDescriptor transfer = between(*a, *b, Op::kRead, 900'000);
  ASSERT_TRUE(a->queue_pair.post(whole(1, transfer)).ok());
  fabric->run_for(milliseconds(10));
  ASSERT_EQ(a->completions.size(), 1);
  EXPECT_EQ(a->completions[0].at, microseconds(300) + 2 * microseconds(5));
  EXPECT_TRUE(std::equal(a->memory.begin(), a->memory.begin() + 900'000, b->memory.begin()));
}

TEST_F(QueuePairTest, MessagesQueueForTheLinkWithoutAGap) {
  make({.link = {.bytes_per_second = 1e9, .latency = microseconds(1)}, .mtu = 999});
  const TransferDescriptor transfer = between(*a, *b, Op::kWrite, 1'000'000);
  for (uint64_t i = 0; i < 10; ++i) {
    ASSERT_TRUE(a->queue_pair.post(request(i, transfer, i * 100'000, (i + 1) * 100'000)).ok());
  }
  fabric->run_for(milliseconds(10));
  ASSERT_EQ(a->completions.size(), 10);
  for (size_t i = 0; i < 10; ++i) {
    EXPECT_EQ(a->completions[i].at, (i + 1) * microseconds(100) + microseconds(2));
  }
}

TEST_F(QueuePairTest, TheTwoDirectionsDoNotDisturbEachOtherAndOneIsShared) {
  make({.link = {.bytes_per_second = 1e9, .latency = Time(0)}});
  End a2(*fabric, 0, 1);
  End b2(*fabric, 1, 0);
  QueuePair::join(a2.queue_pair, b2.queue_pair);
  const TransferDescriptor out = between(*a, *b, Op::kWrite, 500'000);
  const TransferDescriptor out2 = between(a2, b2, Op::kWrite, 500'000);
  const TransferDescriptor back = between(*b, *a, Op::kWrite, 500'000);
  ASSERT_TRUE(a->queue_pair.post(whole(1, out)).ok());
  ASSERT_TRUE(a2.queue_pair.post(whole(2, out2)).ok());
  ASSERT_TRUE(b->queue_pair.post(whole(3, back)).ok());
  fabric->run_for(milliseconds(10));
  EXPECT_EQ(b->completions.at(0).at, microseconds(500));
  // Round-robin: both share the millisecond to the last packets.
  EXPECT_NEAR(a->completions.at(0).at.count(), 1e6, 10e3);
  EXPECT_EQ(a2.completions.at(0).at, milliseconds(1));
}

TEST_F(QueuePairTest, CompletesInOrderWhateverTheNetworkDoes) {
  make({.seed = 3, .link = {.loss = 0.1, .duplicate = 0.1, .reorder = 0.5}, .mtu = 512});
  const TransferDescriptor transfer = between(*a, *b, Op::kWrite, 16 * 10'000);
  std::vector<uint64_t> expected(16);
  std::iota(expected.begin(), expected.end(), 0);
  for (uint64_t id : expected) {
    ASSERT_TRUE(a->queue_pair.post(request(id, transfer, id * 10'000, (id + 1) * 10'000)).ok());
  }
  fabric->run_for(milliseconds(100));
  EXPECT_EQ(a->ids(), expected);
  for (const auto& completion : a->completions) EXPECT_TRUE(completion.status.ok());
  // Each landed once, not in that order.
  std::vector<uint32_t> sorted = b->arrivals;
  std::sort(sorted.begin(), sorted.end());
  EXPECT_EQ(std::vector<uint64_t>(sorted.begin(), sorted.end()), expected);
  EXPECT_FALSE(std::is_sorted(b->arrivals.begin(), b->arrivals.end()));
  EXPECT_TRUE(std::equal(a->memory.begin(), a->memory.begin() + 160'000, b->memory.begin()));
  EXPECT_GT(fabric->stats().lost, 0u);
  EXPECT_GT(fabric->stats().duplicated, 0u);
  EXPECT_GT(fabric->stats().reordered, 0u);
  EXPECT_GT(fabric->stats().timeouts, 0u);
}

TEST_F(QueuePairTest, AtomicsAreExecutedOnceEvenWhenTheirAnswerIsLost) {
  make({.seed = 5, .link = {.loss = 0.4, .duplicate = 0.3}, .retry_count = 50});
  const TransferDescriptor transfer = between(*a, *b, Op::kWrite, 0);
  std::fill(b->memory.begin(), b->memory.end(), std::byte{0});
  for (uint64_t i = 0; i < 200; ++i) {
    ASSERT_TRUE(a->queue_pair
                    .post({.id = i,
                           .op = WorkRequest::Op::kAdd,
                           .transfer = &transfer,
                           .atomic_offset = 64,
                           .atomic_amount = i})
                    .ok());
    fabric->run_until([&] { return a->completions.size() > i; }, milliseconds(100));
  }
  ASSERT_EQ(a->completions.size(), 200u);
  uint64_t sum = 0;
  memcpy(&sum, b->memory.data() + 64, sizeof sum);
  EXPECT_EQ(sum, 199u * 200 / 2);
}

TEST_F(QueuePairTest, RefusesWhatAnAdapterRefusesAndRemembersIt) {
  make({.queue_depth = 4, .max_message = 1000});
  const TransferDescriptor transfer = between(*a, *b, Op::kWrite, 100'000);
  EXPECT_FALSE(a->queue_pair.post(request(0, transfer, 0, 1001)).ok());
  EXPECT_FALSE(
      a->queue_pair.post({.op = WorkRequest::Op::kAdd, .transfer = &transfer, .atomic_offset = 12})
          .ok());
  TransferDescriptor unregistered = transfer;
  unregistered.local_region = 7;
  EXPECT_FALSE(a->queue_pair.post(request(0, unregistered, 0, 10)).ok());
  TransferDescriptor outside = transfer;
  outside.local = Layout::contiguous(kMemory - 10, 100'000);
  EXPECT_FALSE(a->queue_pair.post(request(0, outside, 0, 10)).ok());
  for (uint64_t i = 0; i < 4; ++i) ASSERT_TRUE(a->queue_pair.post(request(i, transfer, 0, 9)).ok());
  EXPECT_FALSE(a->queue_pair.post(request(4, transfer, 0, 9)).ok());
  a->queue_pair.fail(absl::UnavailableError("test"));
  EXPECT_FALSE(a->queue_pair.post(request(5, transfer, 0, 9)).ok());
  EXPECT_THAT(fabric->violations(),
              ElementsAre(HasSubstr("the limit is 1000"), HasSubstr("multiple of 8"),
                          HasSubstr("not registered"), HasSubstr("ends at byte"),
                          HasSubstr("queue depth of 4"), HasSubstr("broken")));
}

TEST_F(QueuePairTest, ARefusedAccessBreaksTheQueuePairAndFlushesTheRestInOrder) {
  make({});
  const TransferDescriptor good = between(*a, *b, Op::kWrite, 1000);
  TransferDescriptor bad = good;
  bad.remote.key ^= 1;
  const std::vector<std::byte> before = b->memory;
  ASSERT_TRUE(a->queue_pair.post(whole(1, good)).ok());
  ASSERT_TRUE(a->queue_pair.post(whole(2, bad)).ok());
  for (uint64_t i = 3; i < 8; ++i) ASSERT_TRUE(a->queue_pair.post(whole(i, good)).ok());
  fabric->run_for(milliseconds(1));
  ASSERT_THAT(a->ids(), ElementsAre(1, 2, 3, 4, 5, 6, 7));
  EXPECT_TRUE(a->completions[0].status.ok());
  EXPECT_EQ(a->completions[1].status.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_FALSE(a->completions[1].flushed);
  // None came twice, and none was lost: what the other end has is done, the rest goes again.
  for (size_t i = 2; i < 7; ++i) {
    EXPECT_TRUE(a->completions[i].flushed || a->completions[i].status.ok());
  }
  EXPECT_THAT(a->breaks, ElementsAre(Break::kRefused));
  EXPECT_FALSE(a->queue_pair.ready());

  a->queue_pair.recover();
  EXPECT_THAT(b->breaks, ElementsAre(Break::kPeerRecovers));
  fabric->run_for(milliseconds(1));
  EXPECT_EQ(a->recoveries, 1);
  EXPECT_EQ(b->recoveries, 1);
  a->completions.clear();
  ASSERT_TRUE(a->queue_pair.post(whole(9, good)).ok());
  fabric->run_for(milliseconds(1));
  ASSERT_THAT(a->ids(), ElementsAre(9));
  EXPECT_TRUE(a->completions[0].status.ok());
  EXPECT_THAT(fabric->violations(), IsEmpty());
}

TEST_F(QueuePairTest, NothingOfARefusedAccessIsWritten) {
  make({.mtu = 64});
  TransferDescriptor bad = between(*a, *b, Op::kWrite, 10'000);
  bad.remote_layout = Layout::contiguous(kMemory - 5000, 10'000);  // its first half would fit
  const std::vector<std::byte> before = b->memory;
  ASSERT_TRUE(a->queue_pair.post(whole(1, bad)).ok());
  fabric->run_for(milliseconds(1));
  ASSERT_EQ(a->completions.size(), 1u);
  EXPECT_EQ(a->completions[0].status.code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(b->memory, before);
}

TEST_F(QueuePairTest, ARegionThatGoesWhileItIsReadFailsTheReadAndStops) {
  make({.link = {.bytes_per_second = 1e9}});
  const TransferDescriptor read = between(*a, *b, Op::kRead, 1'000'000);
  ASSERT_TRUE(a->queue_pair.post(whole(1, read)).ok());
  std::vector<std::byte> seen;
  fabric->at(microseconds(500), [&] {
    const MemoryRegion region{b->entry.base, b->entry.size, b->entry.index, b->entry.generation,
                              b->entry.access};
    ASSERT_TRUE(b->table.remove(region).ok());
    seen = a->memory;
  });
  fabric->run_for(milliseconds(10));
  ASSERT_EQ(a->completions.size(), 1u);
  EXPECT_EQ(a->completions[0].status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(a->memory, seen);
}

TEST_F(QueuePairTest, BreaksWhenTheRetriesRunOutAndNotBefore) {
  SimOptions options{.link = {.latency = Time(0)}, .ack_timeout = milliseconds(1)};
  options.retry_count = 3;
  make(options);
  const TransferDescriptor transfer = between(*a, *b, Op::kWrite, 0);
  fabric->flap(0, 1, 0, Time(0), milliseconds(2) + microseconds(500));
  fabric->run_for(Time(1));
  ASSERT_TRUE(a->queue_pair.post(whole(1, transfer)).ok());
  fabric->run_for(milliseconds(20));
  ASSERT_THAT(a->ids(), ElementsAre(1));  // came through with the third retry
  EXPECT_TRUE(a->completions[0].status.ok());

  const Time start = fabric->clock().now();
  fabric->flap(0, 1, 0, start, start + milliseconds(100));
  fabric->run_for(Time(1));
  ASSERT_TRUE(a->queue_pair.post(whole(2, transfer)).ok());
  fabric->run_for(milliseconds(20));
  ASSERT_THAT(a->ids(), ElementsAre(1, 2));
  EXPECT_TRUE(a->completions[1].flushed);
  EXPECT_EQ(a->completions[1].at, start + Time(1) + milliseconds(4));
  EXPECT_THAT(a->breaks, ElementsAre(Break::kLost));
  EXPECT_THAT(std::string(a->why.message()), HasSubstr("retry count exceeded"));
}

}  // namespace
}  // namespace baton::sim
