// Seeded fault schedules over real sockets: connections are cut at any byte, acknowledgements held
// back, either side sleeps, transfers are cancelled and run out of time, and a target reuses its
// memory as soon as it has been told that it may. Nothing is lost, repeated, late or hung.
//
// tests/seeds.h says which ones run.
#include "tests/sanitized.h"
#include "tests/seeds.h"
#include "tests/tcp/faulty_network.h"
#include "tests/tcp/tcp_pair.h"
#include "tests/test.h"
#include "transport/worker.h"

namespace baton::tcp {
namespace {

using std::chrono::milliseconds;

constexpr size_t kBlock = 96 << 10;  // each transfer has one of its own at either end
constexpr size_t kTransfers = 24;
constexpr size_t kHalf = kBlock * kTransfers;  // sources first, then destinations
constexpr char kUntouched = 'u';
constexpr char kUnwritten = 'p';
constexpr char kTakenAgain = 'r';

char byte_of(uint64_t seed, size_t transfer, size_t at) {
  return static_cast<char>((seed * 131 + transfer * 17 + at * 7 + (at >> 8) * 3) & 31);
}

class Schedule {
 public:
  explicit Schedule(uint64_t seed) : seed_(seed), random_(seed) {
    const std::string sockets = std::to_string(1 + pick(3));
    const std::string slice = std::to_string(4 << pick(4));
    for (Side& side : sides_) {
      side.memory.assign(2 * kHalf, kUntouched);
      auto worker = Worker::create(
          {.name = "side",
           .providers = {"tcp"},
           .key = *ClusterKey::from_bytes("0123456789abcdef"),
           .clock = &clock_,
           .max_transfers = 96,
           .settings = {
               {"tcp.sockets", sockets}, {"tcp.slice_kib", slice}, {"tcp.buffer_kib", "16"}}});
      if (!worker.ok()) std::abort();
      side.worker = *std::move(worker);
      side.region = *side.worker->register_memory(side.memory.data(), side.memory.size());
      side.remote = *side.worker->remote_region(side.region);
    }
    network_ = std::make_unique<FaultyNetwork>(sides_[1].worker->address());
    sides_[0].peer = *sides_[0].worker->connect(network_->address());
  }

  void run() {
    until([&] { return sides_[1].peer.generation != 0; });
    for (size_t i = 0; i < kTransfers; ++i) plan(i);
    size_t next = 0;
    for (int round = 0; round < 400; ++round) {
      if (next < kTransfers && pick(4) == 0) submit(items_[next++]);
      disturb();
      step();
      if (pick(8) == 0) clock_.advance(milliseconds(1));
    }
    network_->hold(FaultyNetwork::kThere, false);
    network_->hold(FaultyNetwork::kBack, false);
    asleep_ = {};
    while (next < kTransfers) submit(items_[next++]);
    const bool leaves = pick(6) == 0;
    if (leaves) {
      leaves_[1] = true;
      leaves_[0] = pick(3) == 0;
    }
    for (size_t side = 0; side < 2; ++side) {
      if (leaves_[side]) sides_[side].worker->begin_disconnect(sides_[side].peer);
    }
    until([&] {
      if (++quiet_ % 8 == 0) clock_.advance(milliseconds(1));  // nothing has moved for a while
      return parted() && std::all_of(items_.begin(), items_.end(), [](const Item& item) {
               return item.ended || !item.submitted;
             });
    });
    for (int quiet = 0; quiet < 100; ++quiet) {
      if (step()) quiet = 0;
    }
    for (Item& item : items_) check(item, leaves);
  }

  size_t done() const { return done_; }
  size_t cuts() const { return cuts_; }
  uint64_t resumed() const { return sides_[0].worker->stats().peers_resumed; }
  uint64_t moved() const { return sides_[0].worker->stats().slices_moved; }

 private:
  struct Side {
    std::unique_ptr<Worker> worker;
    std::vector<char> memory;
    MemoryRegion region;
    RemoteRegion remote;
    PeerId peer;
  };
  struct Item {
    Schedule* schedule = nullptr;
    size_t number = 0;
    size_t from = 0;
    Op op = Op::kWrite;
    size_t bytes = 0;
    CounterId counter;
    TransferId id;
    bool submitted = false;
    bool ended = false;
    bool parted = false;
    int notified = 0;
    absl::Status result;
    std::string at_end;
    size_t source() const { return op == Op::kWrite ? from : 1 - from; }
    size_t target() const { return 1 - source(); }
  };

  size_t pick(size_t limit) { return static_cast<size_t>(random_() % limit); }
  char* block(size_t side, const Item& item, bool destination) {
    return sides_[side].memory.data() + (destination ? kHalf : 0) + item.number * kBlock;
  }

  void plan(size_t number) {
    Item& item = items_[number];
    item.schedule = this;
    item.number = number;
    item.from = pick(2);
    item.op = pick(4) == 0 ? Op::kRead : Op::kWrite;
    const size_t sizes[] = {0, 1 + pick(100), 1 + pick(8192), 1 + pick(kBlock), kBlock};
    item.bytes = item.op == Op::kRead ? 1 + pick(kBlock) : sizes[pick(5)];
    char* source = block(item.source(), item, false);
    for (size_t i = 0; i < item.bytes; ++i) source[i] = byte_of(seed_, number, i);
    if (item.op == Op::kWrite) item.counter = *sides_[item.target()].worker->allocate_counter();
  }

  void submit(Item& item) {
    Side& side = sides_[item.from];
    const size_t here = item.number * kBlock;
    TransferRequest request{
        .op = item.op,
        .peer = side.peer,
        .local = side.region,
        .local_layout = Layout::contiguous(here + (item.op == Op::kRead ? kHalf : 0), item.bytes),
        .remote = sides_[1 - item.from].remote,
        .remote_layout = Layout::contiguous(here + (item.op == Op::kWrite ? kHalf : 0), item.bytes),
        .timeout = pick(6) == 0 ? milliseconds(pick(30)) : kNever,
        .on_end = &Schedule::on_end,
        .context = &item};
    const std::string notify = std::to_string(item.number);
    if (item.op == Op::kWrite) {
      request.counter = sides_[item.target()].worker->remote_counter(item.counter);
      request.notify = notify;
    }
    auto id = side.worker->submit(request);
    item.submitted = id.ok();
    if (id.ok()) item.id = *id;
  }

  void disturb() {
    std::vector<FaultyNetwork::Line>& lines = network_->lines();
    FaultyNetwork::Line& line = lines[pick(lines.size())];
    switch (pick(40)) {
      case 0:
        network_->cut(line);
        ++cuts_;
        break;
      case 1:
        if (line.open()) network_->cut_near(line);
        ++cuts_;
        break;
      case 2:
        if (pick(4) == 0) network_->cut_all();
        break;
      case 3:
      case 4:
        line.held[pick(2)] = true;
        break;
      case 5:
      case 6:
      case 7:
        line.held = {};
        break;
      case 8:
        asleep_[pick(2)] = static_cast<int>(pick(30));
        break;
      case 9:
        if (Item& item = items_[pick(kTransfers)]; item.submitted && !item.ended) {
          EXPECT_TRUE(sides_[item.from].worker->cancel(item.id).ok());
        }
        break;
      default:
        break;
    }
  }

  bool step() {
    bool any = network_->step();
    for (size_t i = 0; i < 2; ++i) {
      Side& side = sides_[i];
      if (asleep_[i] > 0 && asleep_[i]-- > 0) continue;
      any |= side.worker->progress();
      while (auto event = side.worker->next_peer_event()) {
        side.peer = event->peer;
      }
      while (side.worker->next_notification(notification_)) {
        Item& item = items_[std::stoul(notification_.payload)];
        EXPECT_EQ(item.target(), i);
        if (++item.notified == 1) reuse(item);
      }
    }
    if (any) quiet_ = 0;
    return any;
  }
  // The workers' clock is the test's; the kernel has its own.
  template <typename Ready>
  void until(const Ready& ready, CallSite from = CallSite::here()) {
    const auto state = [&] { return state_of(*sides_[0].worker, sides_[0].peer, "a"); };
    baton::until(
        ready, [&] { step(); }, state, from);
  }

  void reuse(Item& item) {
    char* target = block(item.target(), item, true);
    for (size_t i = 0; i < item.bytes; ++i) {
      ASSERT_EQ(target[i], byte_of(seed_, item.number, i)) << "announced, but not there: " << i;
    }
    std::fill(target, target + kBlock, kTakenAgain);
  }

  // When disconnect() is over, all memory of both sides may be used for something else.
  bool parted() {
    for (size_t side = 0; side < 2; ++side) {
      Worker& worker = *sides_[side].worker;
      if (!leaves_[side]) continue;
      if (worker.peer_state(sides_[side].peer) != PeerState::kDown) return false;
      leaves_[side] = false;
      EXPECT_TRUE(worker.disconnect(sides_[side].peer).ok())
          << worker.disconnect(sides_[side].peer);
      step();  // what had been announced is read
      for (Item& item : items_) {
        if (item.from == side && item.submitted) {
          EXPECT_TRUE(item.ended) << item.number;
        }
        item.parted = true;
        std::fill_n(block(item.target(), item, true), kBlock, kTakenAgain);
        std::fill_n(block(item.source(), item, false), kBlock, kUnwritten);
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
    if (status.ok()) ++schedule.done_;
    item.at_end.assign(schedule.block(item.target(), item, true), kBlock);
    char* source = schedule.block(item.source(), item, false);
    std::fill(source, source + kBlock, kUnwritten);
  }

  void check(Item& item, bool left) {
    if (!item.submitted) return;
    SCOPED_TRACE(testing::Message() << "transfer " << item.number << ": " << item.result);
    const std::string now(block(item.target(), item, true), kBlock);
    if (item.notified != 0 || item.parted) {
      EXPECT_TRUE(now == std::string(kBlock, kTakenAgain))
          << "landed in memory that had been reused";
    } else {
      EXPECT_TRUE(now == item.at_end) << "bytes moved after the end";
      for (size_t i = 0; item.result.ok() && i < item.bytes; ++i) {
        ASSERT_EQ(now[i], byte_of(seed_, item.number, i)) << i;
      }
    }
    if (item.op == Op::kRead) return;
    const uint64_t value = sides_[item.target()].worker->counter_value(item.counter);
    EXPECT_LE(value, 1u);
    EXPECT_LE(item.notified, 1);
    if (item.result.ok()) {
      EXPECT_EQ(value, 1u);
      EXPECT_EQ(item.notified, 1);
    }
    if (!left) {
      EXPECT_TRUE(item.result.ok() || absl::IsCancelled(item.result) ||
                  absl::IsDeadlineExceeded(item.result))
          << "nobody asked for this end";
    }
  }

  const uint64_t seed_;
  std::mt19937_64 random_;
  ManualClock clock_;
  std::array<Item, kTransfers> items_;
  std::array<int, 2> asleep_{};
  std::array<bool, 2> leaves_{};
  uint64_t quiet_ = 0;
  Notification notification_;
  size_t done_ = 0;
  size_t cuts_ = 0;
  std::unique_ptr<FaultyNetwork> network_;
  std::array<Side, 2> sides_;
};

TEST(TcpFaults, EveryTransferEndsExactlyOnce) {
  const Seeds seeds(kSanitized ? 40 : 300);
  size_t done = 0, cuts = 0;
  uint64_t resumed = 0, moved = 0;
  for (uint64_t seed = seeds.begin; seed < seeds.end; ++seed) {
    SCOPED_TRACE(testing::Message() << "BATON_SEED=" << seed);
    auto schedule = std::make_unique<Schedule>(seed);
    schedule->run();
    if (HasFailure()) return;
    done += schedule->done();
    cuts += schedule->cuts();
    resumed += schedule->resumed();
    moved += schedule->moved();
  }
  if (seeds.one) return;
  // The schedules did what they are for.
  EXPECT_GT(done, seeds.count() * kTransfers / 2);
  EXPECT_GT(cuts, seeds.count());
  EXPECT_GT(resumed, 0u);
  EXPECT_GT(moved, 0u);
}

}  // namespace
}  // namespace baton::tcp
