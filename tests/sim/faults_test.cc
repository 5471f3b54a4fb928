// Thousands of seeded fault schedules: whatever the network does, every transfer ends, what is done
// is exact, after its end no byte of a transfer moves, and none after its target has heard that it
// is there: from then on the target uses the memory for something else.
//
// BATON_SEED=n runs only schedule n, BATON_SEEDS=n so many in all.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <random>

#include "tests/sanitized.h"
#include "tests/sim/cluster.h"

namespace baton::sim {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr size_t kBlock = 24 << 10;  // each transfer has one of its own at either end
constexpr size_t kTransfers = 32;
constexpr size_t kHalf = kBlock * kTransfers;  // sources first, then destinations
constexpr std::byte kUntouched{0xee};
constexpr std::byte kPoison{0xdd};
constexpr std::byte kReused{0xcc};

constexpr uint64_t kPerShard = kSanitized ? 25 : 250;
// All of it is in one thread, where the thread sanitizer finds little and takes longest.
constexpr int kShards = kThreadSanitized ? 6 : 20;

std::byte pattern(uint64_t seed, size_t transfer, size_t at) {
  return std::byte((seed * 131 + transfer * 17 + at * 7 + (at >> 8) * 3) &
                   127);  // none of the above
}

// A random layout of `bytes` bytes inside [base, base + kBlock), and where each byte lies.
struct Place {
  Layout layout;
  std::vector<uint32_t> pages;
  std::vector<size_t> offsets;
};

void place(Place& out, std::mt19937_64& random, size_t base, size_t bytes) {
  const auto pick = [&](size_t limit) { return static_cast<size_t>(random() % limit); };
  const size_t kind = bytes == 0 ? 0 : pick(3);
  if (kind == 0) {
    const size_t at = base + pick(kBlock - bytes + 1);
    out.layout = Layout::contiguous(at, bytes);
    for (size_t i = 0; i < bytes; ++i) out.offsets.push_back(at + i);
    return;
  }
  size_t pieces = 1;  // a divisor of bytes
  for (size_t d : {2, 3, 5, 7}) {
    while (bytes % (pieces * d) == 0 && pieces < 64 && pick(4) != 0) pieces *= d;
  }
  const size_t piece = bytes / pieces;
  const size_t stride = piece + pick(kBlock / pieces - piece + 1);
  if (kind == 1) {
    out.layout = Layout::strided(base, pieces, stride, piece);
    for (size_t p = 0; p < pieces; ++p) out.pages.push_back(static_cast<uint32_t>(p));
  } else {
    for (size_t p = 0; p < pieces; ++p) out.pages.push_back(static_cast<uint32_t>(p));
    std::shuffle(out.pages.begin(), out.pages.end(), random);
    out.layout = Layout::paged(base, out.pages, stride, piece);
  }
  for (uint32_t page : out.pages) {
    for (size_t i = 0; i < piece; ++i) out.offsets.push_back(base + page * stride + i);
  }
}

class Schedule {
 public:
  explicit Schedule(uint64_t seed)
      : seed_(seed), random_(seed), options_(conditions()), cluster_(options_, 2 * kHalf, 64) {}

  void run() {
    for (auto& member : cluster_.members) {
      std::fill(member.memory.begin(), member.memory.end(), kUntouched);
    }
    std::tie(peers_[0], peers_[1]) = cluster_.connect(0, 1);
    SimFabric& fabric = cluster_.fabric;
    const Time start = fabric.clock().now();
    const bool mortal = pick(6) == 0;
    for (size_t rail = 0; rail < options_.rails; ++rail) {
      for (size_t flaps = pick(3); flaps > 0; --flaps) {
        const Time down = start + uniform(milliseconds(10));
        fabric.flap(0, 1, rail, down, down + uniform(milliseconds(12)));
      }
    }
    if (mortal) fabric.kill(1, start + uniform(milliseconds(10)));
    for (size_t i = 0; i < kTransfers; ++i) plan(i, start);
    if (seed_ % 4 == 3) plan_parting(start);

    const bool all = fabric.run_until(
        [&] {
          collect_notifications();
          if (!look_for_parting()) return false;
          if (fabric.clock().now() <= start + milliseconds(11)) return false;
          return std::all_of(items_.begin(), items_.end(), [&](const Item& item) {
            return item.ended || !item.submitted || dead(item.from);
          });
        },
        seconds(30));
    EXPECT_TRUE(all) << ended_ << " ended, " << refused_ << " refused of " << kTransfers;
    fabric.run_for(milliseconds(50));  // whatever is still on the wires
    collect_notifications();
    for (size_t i = 0; i < kTransfers; ++i) check(i);
    check_the_rest();
    EXPECT_THAT(fabric.violations(), testing::IsEmpty());
    for (size_t node = 0; node < 2; ++node) {
      if (dead(node)) continue;
      EXPECT_EQ(cluster_.worker(node).stats().open_transfers, 0u);
    }
  }

  const SimStats& stats() { return cluster_.fabric.stats(); }
  size_t done() const { return done_; }
  size_t stopped() const { return ended_ - done_; }
  size_t parted() const { return parted_; }

 private:
  struct Item {
    Schedule* schedule = nullptr;
    size_t number = 0;
    size_t from = 0;  // the node that submits
    Op op = Op::kWrite;
    size_t bytes = 0;
    Place source;
    Place target;
    CounterId counter;
    std::string notify;
    TransferId id;
    bool submitted = false;
    bool ended = false;
    absl::Status result;
    std::vector<std::byte> at_end;  // the target block when it ended
    int notified = 0;
    bool parted = false;  // and its pages are used for something else

    size_t source_node() const { return op == Op::kWrite ? from : 1 - from; }
    size_t target_node() const { return 1 - source_node(); }
  };

  size_t pick(size_t limit) { return static_cast<size_t>(random_() % limit); }
  Time uniform(Time limit) {
    return Time(static_cast<int64_t>(pick(static_cast<size_t>(limit.count()) + 1)));
  }
  double probability(double limit) {
    return pick(2) ? 0 : limit * static_cast<double>(pick(100)) / 100;
  }

  SimOptions conditions() {
    SimOptions options;
    options.seed = seed_;
    options.rails = 1 + pick(3);
    options.link.bytes_per_second = 1e8 * static_cast<double>(1 + pick(50));
    options.link.latency = uniform(microseconds(50));
    options.link.loss = probability(0.1);
    options.link.duplicate = probability(0.2);
    options.link.reorder = probability(0.8);
    options.mtu = size_t{1024} << pick(3);
    options.queue_depth = static_cast<uint32_t>(1 + pick(16));
    options.slice_bytes = size_t{2048} << pick(5);
    options.rail_depth = static_cast<uint32_t>(1 + pick(32));
    return options;
  }

  std::byte* memory(size_t node) { return cluster_.members[node].memory.data(); }

  void plan(size_t number, Time start) {
    Item& item = items_[number];
    item.schedule = this;
    item.number = number;
    item.from = pick(2);
    item.op = pick(3) == 0 ? Op::kRead : Op::kWrite;
    const size_t sizes[] = {0, 1, 1 + pick(100), 1 + pick(4096), 1 + pick(kBlock), kBlock};
    item.bytes = item.op == Op::kRead ? 1 + pick(kBlock) : sizes[pick(6)];
    place(item.source, random_, number * kBlock, item.bytes);
    place(item.target, random_, kHalf + number * kBlock, item.bytes);
    for (size_t i = 0; i < item.bytes; ++i) {
      memory(item.source_node())[item.source.offsets[i]] = pattern(seed_, number, i);
    }
    if (item.op == Op::kWrite) {
      auto counter = cluster_.worker(item.target_node()).allocate_counter();
      ASSERT_TRUE(counter.ok());
      item.counter = *counter;
      item.notify = std::to_string(number) + std::string(pick(2) ? pick(600) : 0, '.');
    }
    const Time when = start + uniform(milliseconds(8));
    const Time timeout = pick(8) == 0 ? uniform(milliseconds(4)) : kNever;
    cluster_.fabric.at(when, [this, &item, timeout] { submit(item, timeout); });
    if (pick(5) == 0) {
      cluster_.fabric.at(when + uniform(milliseconds(3)), [this, &item] {
        if (item.submitted && !item.ended) {
          EXPECT_TRUE(cluster_.worker(item.from).cancel(item.id).ok());
        }
      });
    }
  }

  void submit(Item& item, Time timeout) {
    const size_t to = 1 - item.from;
    const bool write = item.op == Op::kWrite;
    TransferRequest request{.op = item.op,
                            .peer = peers_[item.from],
                            .local = cluster_.members[item.from].region,
                            .local_layout = write ? item.source.layout : item.target.layout,
                            .remote = cluster_.members[to].remote,
                            .remote_layout = write ? item.target.layout : item.source.layout,
                            .increment = 7 + item.number,
                            .timeout = timeout,
                            .on_end = &Schedule::on_end,
                            .context = &item};
    if (write) {
      request.counter = cluster_.worker(to).remote_counter(item.counter);
      request.notify = item.notify;
    }
    auto id = cluster_.worker(item.from).submit(request);
    if (!id.ok()) {
      ++refused_;
      return;
    }
    item.submitted = true;
    item.id = *id;
  }

  // One side disconnects in the middle, or both do.
  void plan_parting(Time start) {
    std::mt19937_64 random(seed_);
    for (const size_t node : {size_t{0}, size_t{1}}) {
      if (random() % 3 == 0 && node != seed_ / 4 % 2) continue;
      leaves_[node] = true;
      cluster_.fabric.at(start + microseconds(random() % 10'000), [this, node] {
        if (!dead(node)) cluster_.worker(node).begin_disconnect(peers_[node]);
      });
    }
  }

  // When disconnect() is over all pages of both sides are free. False: not over yet.
  bool look_for_parting() {
    for (size_t node = 0; node < 2; ++node) {
      if (!leaves_[node] || dead(node)) continue;
      Worker& worker = cluster_.worker(node);
      if (worker.peer_state(peers_[node]) != PeerState::kDown) return false;
      leaves_[node] = false;
      if (!worker.disconnect(peers_[node]).ok()) continue;
      ++parted_;
      collect_notifications();
      for (Item& item : items_) {
        if (item.from == node && item.submitted) {
          EXPECT_TRUE(item.ended) << item.number;
        }
        item.parted = true;
        std::byte* target = memory(item.target_node()) + kHalf + item.number * kBlock;
        std::fill(target, target + kBlock, kReused);
        std::byte* source = memory(item.source_node()) + item.number * kBlock;
        std::fill(source, source + kBlock, kPoison);
      }
    }
    return true;
  }

  static void on_end(void* context, TransferId, const absl::Status& status) {
    Item& item = *static_cast<Item*>(context);
    Schedule& schedule = *item.schedule;
    EXPECT_FALSE(item.ended);
    item.ended = true;
    item.result = status;
    ++schedule.ended_;
    if (status.ok()) ++schedule.done_;
    const std::byte* target = schedule.memory(item.target_node()) + kHalf + item.number * kBlock;
    item.at_end.assign(target, target + kBlock);
    // The pages are free again: whoever still sends them sends poison.
    std::byte* source = schedule.memory(item.source_node()) + item.number * kBlock;
    std::fill(source, source + kBlock, kPoison);
  }

  void collect_notifications() {
    for (size_t node = 0; node < 2; ++node) {
      while (cluster_.worker(node).next_notification(notification_)) {
        const size_t number = std::stoul(notification_.payload);
        ASSERT_LT(number, kTransfers);
        Item& item = items_[number];
        EXPECT_EQ(item.target_node(), node);
        EXPECT_EQ(notification_.payload, item.notify);
        if (++item.notified == 1) reuse(item);
      }
    }
  }

  // The target has got it, and needs the pages for the next.
  void reuse(Item& item) {
    for (size_t i = 0; i < item.bytes; ++i) {
      if (memory(item.target_node())[item.target.offsets[i]] != pattern(seed_, item.number, i)) {
        FAIL() << "byte " << i << " of transfer " << item.number
               << " is wrong when it is announced";
      }
    }
    std::byte* target = memory(item.target_node()) + kHalf + item.number * kBlock;
    std::fill(target, target + kBlock, kReused);
  }

  void check(size_t number) {
    SCOPED_TRACE(testing::Message() << "transfer " << number);
    Item& item = items_[number];
    if (!item.submitted) return;
    const std::byte* target = memory(item.target_node()) + kHalf + number * kBlock;
    if (!item.ended) {
      EXPECT_TRUE(dead(item.from));
      return;
    }
    if (item.notified != 0 || item.parted) {
      EXPECT_EQ(std::count(target, target + kBlock, kReused), static_cast<ptrdiff_t>(kBlock))
          << "bytes landed in memory that had been reused: " << item.result;
    } else {
      EXPECT_TRUE(std::equal(item.at_end.begin(), item.at_end.end(), target))
          << "bytes moved after the end: " << item.result;
    }
    if (item.result.ok() && item.notified == 0 && !item.parted) {
      for (size_t i = 0; i < item.bytes; ++i) {
        if (memory(item.target_node())[item.target.offsets[i]] != pattern(seed_, number, i)) {
          FAIL() << "byte " << i << " of " << item.bytes << " is wrong";
        }
      }
    }
    std::vector<bool> own(kBlock);
    for (size_t offset : item.target.offsets) own[offset - kHalf - number * kBlock] = true;
    for (size_t at = 0; at < kBlock; ++at) {
      if (!own[at] && item.notified == 0 && !item.parted && target[at] != kUntouched) {
        FAIL() << "written outside, at " << at << " of the block";
      }
    }
    if (item.op != Op::kWrite) return;
    const uint64_t value = cluster_.worker(item.target_node()).counter_value(item.counter);
    const bool alive = !dead(item.target_node());
    if (item.result.ok() && alive) {
      EXPECT_EQ(value, 7 + number);
      EXPECT_EQ(item.notified, 1);
    } else {
      EXPECT_TRUE(value == 0 || value == 7 + number) << value;
      EXPECT_LE(item.notified, 1);
    }
  }

  // A node that died may hold arrivals that its worker never saw.
  bool dead(size_t node) { return node == 1 && !cluster_.fabric.alive(1); }

  // Blocks that no transfer of that node's has as its target.
  void check_the_rest() {
    for (size_t number = 0; number < kTransfers; ++number) {
      const std::byte* other = memory(items_[number].source_node()) + kHalf + number * kBlock;
      ASSERT_EQ(std::count(other, other + kBlock, kUntouched), static_cast<ptrdiff_t>(kBlock));
    }
  }

  const uint64_t seed_;
  std::mt19937_64 random_;
  const SimOptions options_;
  PeerId peers_[2];
  std::array<Item, kTransfers> items_;
  Notification notification_;
  size_t ended_ = 0;
  size_t done_ = 0;
  size_t refused_ = 0;
  std::array<bool, 2> leaves_{};
  size_t parted_ = 0;
  SimCluster cluster_;  // last: its end ends what is open, which writes to the items
};

class FaultSchedules : public testing::TestWithParam<int> {};

TEST_P(FaultSchedules, EveryTransferEndsExactly) {
  const char* only = std::getenv("BATON_SEED");
  const char* in_all = std::getenv("BATON_SEEDS");
  const uint64_t per_shard =
      in_all == nullptr ? kPerShard : std::strtoull(in_all, nullptr, 10) / kShards + 1;
  SimStats sum;
  size_t done = 0;
  size_t stopped = 0;
  size_t parted = 0;
  for (uint64_t i = 0; i < per_shard; ++i) {
    const uint64_t seed = static_cast<uint64_t>(GetParam()) * per_shard + i;
    if (only != nullptr && seed != std::strtoull(only, nullptr, 10)) continue;
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    auto schedule = std::make_unique<Schedule>(seed);
    schedule->run();
    if (HasFailure()) return;
    done += schedule->done();
    stopped += schedule->stopped();
    parted += schedule->parted();
    sum.lost += schedule->stats().lost;
    sum.duplicated += schedule->stats().duplicated;
    sum.reordered += schedule->stats().reordered;
    sum.timeouts += schedule->stats().timeouts;
    sum.rails_lost += schedule->stats().rails_lost;
  }
  if (only != nullptr) return;
  // The schedules did what they are for.
  EXPECT_GT(done, per_shard * kTransfers / 2);
  EXPECT_GT(stopped, 0u);
  EXPECT_GT(parted, 0u);
  EXPECT_GT(sum.lost, 0u);
  EXPECT_GT(sum.duplicated, 0u);
  EXPECT_GT(sum.reordered, 0u);
  EXPECT_GT(sum.timeouts, 0u);
  EXPECT_GT(sum.rails_lost, 0u);
}

INSTANTIATE_TEST_SUITE_P(Seeds, FaultSchedules, testing::Range(0, kShards));

}  // namespace
}  // namespace baton::sim
