// Seeded fault schedules over verbs in which the target needs each block for something else as soon
// as it has been told that its bytes are there. Adapters write without the target's processor: what
// is repeated after that, or still moves on a lost rail, would be found in memory that is in use.
//
// tests/seeds.h says which ones run.
#include <array>

#include "tests/sanitized.h"
#include "tests/seeds.h"
#include "tests/verbs/verbs_pair.h"

namespace baton {
namespace {

constexpr size_t kBlock = 64 << 10;  // each transfer has one of its own at either end
constexpr size_t kTransfers = 32;
constexpr size_t kTargets = VerbsPair::kBytes / 2;  // sources before, targets from here on
constexpr std::byte kPoison{0xdd};                  // sources after the end
constexpr std::byte kReused{0xcc};
constexpr uint64_t kSeeds = kSanitized ? 60 : 510;
constexpr uint64_t kEnough = 500;
constexpr int kShards = 6;

std::byte pattern(uint64_t seed, size_t transfer, size_t at) {
  return std::byte((seed * 131 + transfer * 17 + at * 7 + (at >> 8) * 3) & 127);
}

struct Seen {
  uint64_t told_before_the_end = 0;  // reused while the sender did not know
  uint64_t stopped = 0;
  uint64_t rails_lost = 0;
  uint64_t peers_lost = 0;
  uint64_t slices_moved = 0;
  uint64_t receipts = 0;
  uint64_t flushed = 0;
  uint64_t landed_late = 0;  // from queue pairs that had ended
};

class Schedule {
 public:
  explicit Schedule(uint64_t seed)
      : seed_(seed), random_(seed), devices_(1 + pick(3)), pair_(network(), settings()) {
    pair_.tick = std::chrono::microseconds(100 + pick(200));
    pair_.expect_ready = false;  // a rail that is lost may have used them up
    if (pick(2) == 0) pair_.fake->set_late_packets(static_cast<int>(1 + pick(400)));
  }

  void run(Seen& seen) {
    ASSERT_TRUE(pair_.connect());
    for (size_t i = 0; i < kTransfers; ++i) prepare(i);
    for (size_t next = 0; next < kTransfers;) {
      for (size_t more = pick(12); more > 0 && next < kTransfers; --more) submit(items_[next++]);
      steps(pick(12));
      const size_t device = pick(devices_);
      const bool all = pick(3) == 0;
      const size_t kind = pick(7);
      for (size_t each = 0; each < devices_; ++each) {
        if (all || each == device) break_it(kind, each);
      }
      steps(pick(150));
      cancel_some();
      steps(pick(150));
      for (size_t each = 0; each < devices_; ++each) undo(each);
      steps(pick(20));
    }
    const bool over = pair_.drive([&] {
      look();
      return ended_ == kTransfers;
    });
    EXPECT_TRUE(over) << ended_ << " ended of " << kTransfers;
    for (int i = 0; i < 300; ++i) both();
    for (const Item& item : items_) check(item);
    count(seen);
  }

 private:
  struct Item {
    Schedule* schedule = nullptr;
    size_t number = 0;
    size_t from = 0;  // the side that submits
    Op op = Op::kWrite;
    size_t bytes = 0;
    size_t at = 0;  // within the blocks
    CounterId counter;
    uint64_t increment = 0;
    std::string notify;
    TransferId id;
    bool stopped = false;  // cancelled, or with a deadline
    bool ended = false;
    absl::Status result;
    std::vector<std::byte> at_end;  // the target block then
    int notified = 0;
    bool told = false;  // the target knows, and has reused the block

    size_t target_side() const { return op == Op::kWrite ? 1 - from : from; }
  };

  size_t pick(size_t limit) { return static_cast<size_t>(random_() % limit); }
  FakeOptions network() {
    return {.devices = devices_,
            .bytes_per_poll = size_t{2048} << pick(6),
            .max_shared = pick(4) == 0 ? 0 : 8192};
  }
  VerbsPair::Settings settings() {
    return {{"peer.redial_ms", "600000"},
            {"verbs.timeout", "8"},
            {"verbs.retry_count", "2"},
            {"verbs.hold_ms", "5"},
            {"verbs.stall_ms", "20"},
            {"verbs.settle_ms", "20"},
            {"verbs.port_grace_ms", pick(2) ? "5" : "50"},
            {"verbs.qps", std::to_string(1 + pick(2))},
            {"verbs.slice_kib", std::to_string(4 << pick(4))}};
  }
  VerbsPair::Side& side(size_t which) { return which == 0 ? pair_.a : pair_.b; }
  std::byte* source(const Item& item) {
    return side(1 - item.target_side()).memory.data() + item.number * kBlock;
  }
  std::byte* target(const Item& item) {
    return side(item.target_side()).memory.data() + kTargets + item.number * kBlock;
  }

  void prepare(size_t number) {
    Item& item = items_[number];
    item.schedule = this;
    item.number = number;
    item.from = pick(2);
    if (pick(8) == 0) item.op = Op::kRead;
    const size_t sizes[] = {8, 1 + pick(4096), 1 + pick(kBlock), kBlock};
    item.bytes = sizes[pick(4)];
    item.at = pick(kBlock - item.bytes + 1);
    for (size_t i = 0; i < item.bytes; ++i) source(item)[item.at + i] = pattern(seed_, number, i);
    if (item.op == Op::kRead) return;
    const size_t kind = pick(5);
    if (kind != 2 && kind != 3) {
      item.counter = *side(item.target_side()).worker->allocate_counter();
      item.increment = kind == 0 ? 1 : 7 + number;
    }
    if (kind >= 2) item.notify = std::to_string(number) + std::string(kind == 3 ? 3000 : 0, '.');
  }

  void submit(Item& item) {
    const bool write = item.op == Op::kWrite;
    const size_t near = item.number * kBlock + item.at;
    const size_t far = kTargets + near;
    TransferRequest request{
        .op = item.op,
        .peer = side(item.from).peer,
        .local = side(item.from).region,
        .local_layout = Layout::contiguous(write ? near : far, item.bytes),
        .remote = side(1 - item.from).remote,
        .remote_layout = Layout::contiguous(write ? far : near, item.bytes),
        .increment = std::max<uint64_t>(1, item.increment),
        .notify = item.notify,
        .timeout = pick(12) == 0 ? std::chrono::microseconds(pick(20'000)) : kNever,
        .on_end = &Schedule::on_end,
        .context = &item};
    item.stopped = request.timeout != kNever;
    if (item.increment != 0) {
      request.counter = side(1 - item.from).worker->remote_counter(item.counter);
    }
    auto id = side(item.from).worker->submit(request);
    ASSERT_TRUE(id.ok()) << id.status();
    item.id = *id;
  }

  void cancel_some() {
    if (pick(3) != 0) return;
    Item& item = items_[pick(kTransfers)];
    if (item.id.generation == 0 || item.ended) return;
    item.stopped = true;
    EXPECT_TRUE(side(item.from).worker->cancel(item.id).ok());
  }

  void break_it(size_t kind, size_t device) {
    FakeVerbs& fake = *pair_.fake;
    switch (kind) {
      case 0:
        return fake.set_port(device, false);
      case 1:
      case 2:
        return fake.set_mute(device, true);
      case 3:
        return fake.set_cable(device, false);
      case 4:
        return fake.break_queue_pairs(device);
      case 5:
        completions_lost_ = true;
        return fake.break_completion_queues(device);
      default:
        return fake.set_hanging(device, true);
    }
  }
  void undo(size_t device) {
    FakeVerbs& fake = *pair_.fake;
    if (!fake.port_up(device)) fake.set_port(device, true);
    fake.set_cable(device, true);
    fake.set_mute(device, false);
    fake.set_hanging(device, false);
  }

  // One side may be busy while the other goes on.
  void steps(size_t count) {
    for (size_t i = 0; i < count; ++i) {
      const size_t who = pick(4);
      if (who < 2) {
        both();
      } else {
        side(who - 2).worker->progress();
        look();
      }
    }
  }
  void both() {
    pair_.step();
    look();
  }

  static void on_end(void* context, TransferId, const absl::Status& status) {
    Item& item = *static_cast<Item*>(context);
    Schedule& schedule = *item.schedule;
    EXPECT_FALSE(item.ended) << "ended twice";
    item.ended = true;
    item.result = status;
    ++schedule.ended_;
    const std::byte* target = schedule.target(item);
    item.at_end.assign(target, target + kBlock);
    std::fill_n(schedule.source(item), kBlock, kPoison);
  }

  // What the targets have been told, after each round.
  void look() {
    for (const size_t which : {size_t{0}, size_t{1}}) {
      while (side(which).worker->next_notification(notification_)) {
        const size_t number = std::stoul(notification_.payload);
        ASSERT_LT(number, kTransfers);
        EXPECT_EQ(items_[number].target_side(), which);
        EXPECT_EQ(notification_.payload, items_[number].notify);
        ++items_[number].notified;
        reuse(items_[number]);
      }
    }
    for (Item& item : items_) {
      if (item.told || item.increment == 0) continue;
      if (side(item.target_side()).worker->counter_value(item.counter) != 0) reuse(item);
    }
  }
  void reuse(Item& item) {
    if (std::exchange(item.told, true)) return;
    told_before_the_end_ += !item.ended;
    for (size_t i = 0; i < item.bytes; ++i) {
      if (target(item)[item.at + i] != pattern(seed_, item.number, i)) {
        FAIL() << "byte " << i << " of transfer " << item.number
               << " is wrong when it is announced";
      }
    }
    std::fill_n(target(item), kBlock, kReused);
  }

  void check(const Item& item) {
    SCOPED_TRACE(testing::Message() << "transfer " << item.number << ": " << item.result);
    const std::byte* const now = target(item);
    if (item.told) {
      EXPECT_EQ(std::count(now, now + kBlock, kReused), static_cast<ptrdiff_t>(kBlock))
          << "bytes landed in memory that had been reused";
    } else {
      EXPECT_TRUE(std::equal(item.at_end.begin(), item.at_end.end(), now))
          << "bytes moved after the end";
    }
    const bool done = item.result.ok();
    EXPECT_TRUE(done || item.stopped);
    if (item.op == Op::kRead) {
      for (size_t i = 0; done && i < item.bytes; ++i) {
        if (now[item.at + i] != pattern(seed_, item.number, i)) FAIL() << "byte " << i;
      }
      return;
    }
    const bool told = item.told;
    EXPECT_TRUE(told || !done || completions_lost_) << "the target never heard of it";
    EXPECT_EQ(item.notified, told && !item.notify.empty() ? 1 : 0);
    if (item.increment == 0) return;
    const Worker& worker = *side(item.target_side()).worker;
    EXPECT_EQ(worker.counter_value(item.counter), told ? item.increment : 0);
  }

  void count(Seen& seen) {
    seen.told_before_the_end += told_before_the_end_;
    for (const Item& item : items_) seen.stopped += !item.result.ok();
    for (const size_t which : {size_t{0}, size_t{1}}) {
      const WorkerStats stats = side(which).worker->stats();
      seen.rails_lost += stats.rails_lost;
      seen.peers_lost += stats.peers_lost;
      seen.slices_moved += stats.slices_moved;
      seen.receipts += stats.receipts;
    }
    seen.flushed += pair_.fake->stats().flushed;
    seen.landed_late += pair_.fake->stats().landed_late;
  }

  const uint64_t seed_;
  std::mt19937_64 random_;
  const size_t devices_;
  std::array<Item, kTransfers> items_;
  Notification notification_;
  size_t ended_ = 0;
  uint64_t told_before_the_end_ = 0;
  // What an adapter had acknowledged, and written into a queue that broke, its program never sees.
  bool completions_lost_ = false;
  VerbsPair pair_;  // last: its end ends what is open, which writes to the items
};

class Reuse : public testing::TestWithParam<int> {};

// Promise(rdma): A late packet of an ended queue pair changes no reused memory | 510 schedules with
//   packets that outlive their queue pair
TEST_P(Reuse, OfWhatTheTargetWasToldOf) {
  const Seeds seeds(kSeeds);
  Seen seen;
  for (uint64_t seed = seeds.begin + static_cast<uint64_t>(GetParam()); seed < seeds.end;
       seed += kShards) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    auto schedule = std::make_unique<Schedule>(seed);
    schedule->run(seen);
    if (HasFailure()) return;
  }
  // The schedules did what they are for; a few dozen need not.
  if (seeds.count() < kEnough) return;
  EXPECT_GT(seen.told_before_the_end, 0u);
  EXPECT_GT(seen.stopped, 0u);
  EXPECT_GT(seen.rails_lost, 0u);
  EXPECT_GT(seen.peers_lost, 0u);
  EXPECT_GT(seen.slices_moved, 0u);
  EXPECT_GT(seen.receipts, 0u);
  EXPECT_GT(seen.flushed, 0u);
  EXPECT_GT(seen.landed_late, 0u);
}

INSTANTIATE_TEST_SUITE_P(Seeds, Reuse, testing::Range(0, kShards));

}  // namespace
}  // namespace baton
