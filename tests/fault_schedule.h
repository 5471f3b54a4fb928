// One model of a seeded fault schedule, and one checker of what came of it. Two workers write to
// each other and read; each transfer has a block of its own at either end, in one piece, strided or
// in pages. A target uses a block for something else as soon as it was told that the bytes are
// there, a source as soon as its transfer has ended: what moves after that is found. Worlds plug in
// a network and its faults: tests/sim/faults_test.cc, tests/tcp/faults_test.cc,
// tests/verbs/reuse_test.cc.
#pragma once

#include "tests/seeds.h"
#include "tests/test.h"
#include "transport/worker.h"

namespace baton {

// What schedules came to, added up: that they reached the states they are for.
struct FaultsSeen {
  uint64_t done = 0, cancelled = 0, late = 0, reused = 0, parted = 0;
  uint64_t told_before_the_end = 0;  // reused while the sender did not know
  uint64_t receipts = 0, slices_moved = 0, rails_lost = 0, peers_lost = 0, peers_resumed = 0;

  void add(const WorkerStats& stats) {
    receipts += stats.receipts;
    slices_moved += stats.slices_moved;
    rails_lost += stats.rails_lost;
    peers_lost += stats.peers_lost;
    peers_resumed += stats.peers_resumed;
  }
};

inline void expect_all_seen(std::initializer_list<std::pair<const char*, uint64_t>> counts) {
  for (const auto& [what, count] : counts) {
    EXPECT_GT(count, 0u) << what;
    std::printf("%llu %s\n", static_cast<unsigned long long>(count), what);
  }
}

// The schedules [begin, end), up to the first that fails. False: one did.
template <typename Schedule, typename Seen>
bool run_schedules(uint64_t begin, uint64_t end, Seen& seen) {
  for (uint64_t seed = begin; seed < end; ++seed) {
    SCOPED_TRACE(testing::Message() << "BATON_SEED=" << seed);
    std::make_unique<Schedule>(seed, seen)->run();
    if (testing::Test::HasFailure()) return false;
  }
  return true;
}

class FaultSchedule {
 public:
  virtual ~FaultSchedule() = default;

 protected:
  static constexpr std::byte kUntouched{0xee};
  static constexpr std::byte kPoison{0xdd};  // sources after the end
  static constexpr std::byte kReused{0xcc};  // targets that were told

  FaultSchedule(uint64_t seed, size_t transfers, size_t block, FaultsSeen& seen)
      : seed_(seed),
        random_(seed),
        block_(block),
        half_(transfers * block),
        items_(transfers),
        faults_seen_(seen) {}

  // One of the two workers, and its memory: sources in the first half, targets in the second.
  struct Side {
    Worker* worker = nullptr;
    std::byte* memory = nullptr;
    MemoryRegion region;
    RemoteRegion remote;  // that the schedule began with
    PeerId peer;          // the other one
  };
  // The worker with which the schedule began is dead, or succeeded by another.
  virtual bool gone(size_t) { return false; }
  // The memory of that side is another worker's, and in use.
  virtual bool replaced(size_t) { return false; }
  // Its program runs, and looks.
  virtual bool awake(size_t) { return true; }
  // A transfer may fail though nobody asked for it.
  virtual bool troubled() { return false; }
  // The target of what is done may never hear of it.
  virtual bool deaf() { return false; }

  // A random layout inside of [base, base + block_), and where each byte lies.
  struct Place {
    Layout layout;
    std::vector<uint32_t> pages;
    std::vector<size_t> offsets;
  };
  struct Item {
    FaultSchedule* schedule = nullptr;
    size_t number = 0;
    size_t from = 0;  // the side that submits
    Op op = Op::kWrite;
    size_t bytes = 0;
    Place source, target;
    uint64_t increment = 0;  // of its counter, if it has one
    CounterId counter;
    RemoteCounter remote_counter;
    std::string notify;
    TransferId id;
    bool submitted = false;
    bool stopped = false;  // somebody cancelled it, or it has a deadline
    bool ended = false;
    absl::Status result;
    std::vector<std::byte> at_end;  // the target block when it ended
    int notified = 0;
    bool told = false;    // the target knows, and has reused the block
    bool parted = false;  // after disconnect() its blocks are used for something else

    size_t source_side() const { return op == Op::kWrite ? from : 1 - from; }
    size_t target_side() const { return 1 - source_side(); }
  };

  size_t pick(size_t limit) { return static_cast<size_t>(random_() % limit); }
  std::byte pattern(size_t transfer, size_t at) const {  // none of the above
    return std::byte((seed_ * 131 + transfer * 17 + at * 7 + (at >> 8) * 3) & 127);
  }
  std::byte* source_of(const Item& item) {
    return sides_[item.source_side()].memory + item.number * block_;
  }
  std::byte* target_of(const Item& item) {
    return sides_[item.target_side()].memory + half_ + item.number * block_;
  }

  // Both workers are there: the transfers are made up, and the memory is filled.
  void plan() {
    for (const Side& side : sides_) std::fill_n(side.memory, 2 * half_, kUntouched);
    for (size_t i = 0; i < items_.size(); ++i) plan(i);
  }
  void submit(Item& item, Time timeout) {
    const bool write = item.op == Op::kWrite;
    const Side& mine = sides_[item.from];
    TransferRequest request{.op = item.op,
                            .peer = mine.peer,
                            .local = mine.region,
                            .local_layout = write ? item.source.layout : item.target.layout,
                            .remote = sides_[1 - item.from].remote,
                            .remote_layout = write ? item.target.layout : item.source.layout,
                            .increment = std::max<uint64_t>(1, item.increment),
                            .notify = item.notify,
                            .timeout = timeout,
                            .on_end = &FaultSchedule::on_end,
                            .context = &item};
    if (item.increment != 0) request.counter = item.remote_counter;
    item.stopped = timeout != kNever;
    auto id = mine.worker->submit(request);
    if (!id.ok()) {
      EXPECT_TRUE(troubled()) << id.status();
      ++refused_;
      return;
    }
    item.submitted = true;
    item.id = *id;
  }
  void cancel(Item& item) {
    if (!item.submitted || item.ended) return;
    item.stopped = true;
    EXPECT_TRUE(sides_[item.from].worker->cancel(item.id).ok());
  }

  // A program looks at what it was told.
  void look(size_t which) {
    if (!awake(which)) return;
    Worker& worker = *sides_[which].worker;
    while (worker.next_notification(notification_)) {
      EXPECT_FALSE(gone(which)) << "of another: " << notification_.payload;
      const size_t number = std::stoul(notification_.payload);
      ASSERT_LT(number, items_.size());
      Item& item = items_[number];
      EXPECT_EQ(item.target_side(), which);
      EXPECT_EQ(notification_.payload, item.notify);
      ++item.notified;
      tell(item);
    }
    if (gone(which)) return;
    for (Item& item : items_) {
      if (item.told || item.increment == 0 || item.target_side() != which) continue;
      if (worker.counter_value(item.counter) != 0) tell(item);
    }
  }
  void look() {
    look(0);
    look(1);
  }

  // disconnect() of a side is over: all memory of both may be used for something else.
  void part(size_t which) {
    ++faults_seen_.parted;
    look();  // what had been announced is read
    for (Item& item : items_) {
      if (item.from == which && item.submitted) {
        EXPECT_TRUE(item.ended) << item.number;
      }
      item.parted = true;
      std::fill_n(target_of(item), block_, kReused);
      std::fill_n(source_of(item), block_, kPoison);
    }
  }

  bool all_ended() {
    return std::all_of(items_.begin(), items_.end(), [&](const Item& item) {
      return item.ended || !item.submitted || gone(item.from);
    });
  }

  // What must hold when nothing moves any more.
  void check() {
    look();
    for (const Item& item : items_) {
      SCOPED_TRACE(testing::Message() << "transfer " << item.number << ": " << item.result);
      // No transfer of that side's has this block as its target.
      const std::byte* other = sides_[item.source_side()].memory + half_ + item.number * block_;
      EXPECT_EQ(
          std::count(other, other + block_, replaced(item.source_side()) ? kReused : kUntouched),
          static_cast<ptrdiff_t>(block_));
      if (!item.submitted) continue;
      EXPECT_TRUE(item.ended || gone(item.from));
      if (!item.ended) {
        // The side that sent it is gone: what was on its way must not land in reused memory.
        if (item.told || item.parted || replaced(item.target_side())) check_block(item);
        continue;
      }
      const bool asked =
          item.stopped && (absl::IsCancelled(item.result) || absl::IsDeadlineExceeded(item.result));
      EXPECT_TRUE(item.result.ok() || asked || troubled()) << "this end was not asked for";
      check_block(item);
      if (item.op == Op::kWrite) check_word(item);
      if (testing::Test::HasFailure()) return;
    }
  }

  const uint64_t seed_;
  std::mt19937_64 random_;
  const size_t block_;
  const size_t half_;
  std::vector<Item> items_;
  std::array<Side, 2> sides_;  // the world's to fill
  size_t ended_ = 0;
  size_t refused_ = 0;
  FaultsSeen& faults_seen_;

 private:
  void plan(size_t number) {
    Item& item = items_[number];
    item.schedule = this;
    item.number = number;
    item.from = pick(2);
    item.op = pick(6) == 0 ? Op::kRead : Op::kWrite;
    const size_t sizes[] = {pick(3), 1 + pick(4096), 1 + pick(block_), 1 + pick(block_), block_};
    item.bytes = item.op == Op::kRead ? 1 + pick(block_) : sizes[pick(5)];
    place(item.source, number * block_, item.bytes);
    place(item.target, half_ + number * block_, item.bytes);
    std::byte* const source = sides_[item.source_side()].memory;
    for (size_t i = 0; i < item.bytes; ++i) source[item.source.offsets[i]] = pattern(number, i);
    if (item.op == Op::kRead) return;
    const size_t told_by = pick(6);  // a counter, a notification, or both
    if (told_by != 0) {
      Worker& target = *sides_[item.target_side()].worker;
      item.increment = pick(2) == 0 ? 1 : 7 + number;
      item.counter = *target.allocate_counter();
      item.remote_counter = target.remote_counter(item.counter);
    }
    if (told_by != 1) {
      const size_t lengths[] = {0, 0, pick(600), 3000};
      item.notify = std::to_string(number) + std::string(lengths[pick(4)], '.');
    }
  }
  void place(Place& out, size_t base, size_t bytes) {
    const size_t kind = bytes == 0 ? 0 : pick(4);  // half of them in one piece

    if (kind < 2) {
      const size_t at = base + pick(block_ - bytes + 1);
      out.layout = Layout::contiguous(at, bytes);
      for (size_t i = 0; i < bytes; ++i) out.offsets.push_back(at + i);
      return;
    }
    size_t pieces = 1;  // a divisor of bytes
    for (size_t d : {2, 3, 5, 7}) {
      while (bytes % (pieces * d) == 0 && pieces < 64 && pick(4) != 0) pieces *= d;
    }
    const size_t piece = bytes / pieces;
    const size_t stride = piece + pick(block_ / pieces - piece + 1);
    for (size_t p = 0; p < pieces; ++p) out.pages.push_back(static_cast<uint32_t>(p));
    if (kind == 2) {
      out.layout = Layout::strided(base, pieces, stride, piece);
    } else {
      std::shuffle(out.pages.begin(), out.pages.end(), random_);
      out.layout = Layout::paged(base, out.pages, stride, piece);
    }
    for (uint32_t page : out.pages) {
      for (size_t i = 0; i < piece; ++i) out.offsets.push_back(base + page * stride + i);
    }
  }

  static void on_end(void* context, TransferId, const absl::Status& status) {
    Item& item = *static_cast<Item*>(context);
    FaultSchedule& schedule = *item.schedule;
    EXPECT_FALSE(item.ended) << "ended twice";
    item.ended = true;
    item.result = status;
    ++schedule.ended_;
    schedule.faults_seen_.done += status.ok();
    schedule.faults_seen_.late += absl::IsDeadlineExceeded(status);
    schedule.faults_seen_.cancelled += absl::IsCancelled(status);
    const std::byte* target = schedule.target_of(item);
    item.at_end.assign(target, target + schedule.block_);
    std::fill_n(schedule.source_of(item), schedule.block_, kPoison);
  }

  void tell(Item& item) {
    // Who reads it only after disconnect() finds its memory in use already.
    if (std::exchange(item.told, true) || item.parted) return;
    ++faults_seen_.reused;
    faults_seen_.told_before_the_end += !item.ended;
    const std::byte* const memory = sides_[item.target_side()].memory;
    for (size_t i = 0; i < item.bytes; ++i) {
      if (memory[item.target.offsets[i]] != pattern(item.number, i)) {
        FAIL() << "byte " << i << " of transfer " << item.number
               << " is wrong when it is announced";
      }
    }
    std::fill_n(target_of(item), block_, kReused);
  }

  void check_block(const Item& item) {
    const std::byte* target = target_of(item);
    if (item.told || item.parted || replaced(item.target_side())) {
      EXPECT_EQ(std::count(target, target + block_, kReused), static_cast<ptrdiff_t>(block_))
          << "bytes landed in memory that had been reused";
      return;
    }
    EXPECT_TRUE(std::equal(item.at_end.begin(), item.at_end.end(), target))
        << "bytes moved after the end";
    std::vector<bool> own(block_);
    for (size_t i = 0; i < item.bytes; ++i) {
      const size_t at = item.target.offsets[i] - half_ - item.number * block_;
      own[at] = true;
      if (item.result.ok() && target[at] != pattern(item.number, i)) {
        FAIL() << "byte " << i << " of " << item.bytes << " is wrong";
      }
    }
    for (size_t at = 0; at < block_; ++at) {
      if (!own[at] && target[at] != kUntouched) {
        FAIL() << "written outside, at " << at << " of the block";
      }
    }
  }
  // A worker that is gone may hold arrivals that its program never saw.
  void check_word(const Item& item) {
    if (gone(item.target_side())) {
      EXPECT_LE(item.notified, 1);
      return;
    }
    EXPECT_TRUE(item.told || !item.result.ok() || deaf()) << "the target never heard of it";
    EXPECT_EQ(item.notified, item.told && !item.notify.empty() ? 1 : 0);
    if (item.increment == 0) return;
    EXPECT_EQ(sides_[item.target_side()].worker->counter_value(item.counter),
              item.told ? item.increment : 0);
  }

  Notification notification_;
};

}  // namespace baton
