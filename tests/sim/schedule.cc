// What happens in a schedule. What must hold is in schedule_check.cc.
#include "tests/sim/schedule.h"

#include "tests/test.h"

namespace baton::sim {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

namespace {
constexpr std::byte kUntouched{0xee};
constexpr std::byte kPoison{0xdd};
constexpr std::byte kReused{0xcc};
}  // namespace

Time Schedule::uniform(Time limit) {
  return Time(static_cast<int64_t>(pick(static_cast<size_t>(limit.count()) + 1)));
}

double Schedule::probability(double limit) {
  return pick(2) ? 0 : limit * static_cast<double>(pick(100)) / 100;
}

SimOptions Schedule::conditions() {
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

std::byte Schedule::pattern(size_t transfer, size_t at) const {
  return std::byte((seed_ * 131 + transfer * 17 + at * 7 + (at >> 8) * 3) &
                   127);  // none of the above
}

void Schedule::place(Place& out, std::mt19937_64& random, size_t base, size_t bytes) {
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
  for (size_t p = 0; p < pieces; ++p) out.pages.push_back(static_cast<uint32_t>(p));
  if (kind == 1) {
    out.layout = Layout::strided(base, pieces, stride, piece);
  } else {
    std::shuffle(out.pages.begin(), out.pages.end(), random);
    out.layout = Layout::paged(base, out.pages, stride, piece);
  }
  for (uint32_t page : out.pages) {
    for (size_t i = 0; i < piece; ++i) out.offsets.push_back(base + page * stride + i);
  }
}

Schedule::Schedule(uint64_t seed)
    : seed_(seed), random_(seed), options_(conditions()), cluster_(options_, kBytes, 64) {}

void Schedule::run(Seen& seen) {
  seen_ = &seen;
  for (size_t node = 0; node < 2; ++node) {
    auto& bytes = cluster_.members[node].memory;
    std::fill(bytes.begin(), bytes.end(), kUntouched);
    remotes_[node] = cluster_.members[node].remote;
  }
  std::tie(peers_[0], peers_[1]) = cluster_.connect(0, 1);
  SimFabric& fabric = cluster_.fabric;
  begun_ = fabric.clock().now();
  for (size_t rail = 0; rail < options_.rails; ++rail) {
    for (size_t flaps = pick(3); flaps > 0; --flaps) {
      const Time down = begun_ + uniform(milliseconds(10));
      fabric.flap(0, 1, rail, down, down + uniform(milliseconds(12)));
    }
  }
  mortal_ = pick(6) == 0;
  const Time death = mortal_ ? begun_ + uniform(milliseconds(10)) : kNever;
  // By the seed, so that the rest of the schedule is what it would be without.
  restarts_ = seed_ % 8 == 2 || seed_ % 8 == 6;
  mortal_ = mortal_ && !restarts_;
  if (mortal_) {
    ++seen_->killed;
    fabric.kill(1, death);
  }
  for (size_t i = 0; i < kTransfers; ++i) plan(i, begun_);
  if (seed_ % 4 == 3) plan_parting(begun_);
  if (seed_ % 8 == 1 || seed_ % 8 >= 4) plan_freezes(begun_);
  if (restarts_) plan_restart(begun_);

  const bool all = fabric.run_until([&] { return over(); }, seconds(30));
  EXPECT_TRUE(all) << ended_ << " ended, " << refused_ << " refused of " << kTransfers << "; "
                   << cluster_.worker(0).explain(peers_[0]);
  if (!all && new_peer_) ADD_FAILURE() << cluster_.worker(0).explain(*new_peer_);
  fabric.run_for(milliseconds(50));  // whatever is still on the wires
  collect_notifications();
  for (size_t i = 0; i < kTransfers; ++i) check(i);
  check_the_rest();
  EXPECT_THAT(fabric.violations(), testing::IsEmpty());
  for (size_t node = 0; node < 2; ++node) {
    seen_->add(cluster_.worker(node).stats());
    if (!fabric.alive(node)) continue;
    EXPECT_EQ(cluster_.worker(node).stats().open_transfers, 0u);
  }
  seen_->add(fabric.stats());
}

bool Schedule::over() {
  collect_notifications();
  if (!look_for_parting()) return false;
  if (restarts_ && !look_for_new_peer()) return false;
  if (to_do_ > 0 || cluster_.fabric.clock().now() <= begun_ + milliseconds(11)) return false;
  if (cluster_.fabric.frozen(0) || cluster_.fabric.frozen(1)) return false;
  return std::all_of(items_.begin(), items_.end(), [&](const Item& item) {
    return item.ended || !item.submitted || gone(item.from);
  });
}

void Schedule::plan(size_t number, Time start) {
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
    memory(item.source_node())[item.source.offsets[i]] = pattern(number, i);
  }
  if (item.op == Op::kWrite) {
    auto counter = cluster_.worker(item.target_node()).allocate_counter();
    ASSERT_TRUE(counter.ok());
    item.counter = *counter;
    item.remote_counter = cluster_.worker(item.target_node()).remote_counter(*counter);
    item.notify = std::to_string(number) + std::string(pick(2) ? pick(600) : 0, '.');
  }
  const Time when = start + uniform(milliseconds(8));
  const Time timeout = pick(8) == 0 ? uniform(milliseconds(4)) : kNever;
  by_program(item.from, when, [this, &item, timeout] { submit(item, timeout); });
  if (pick(5) != 0) return;
  by_program(item.from, when + uniform(milliseconds(3)), [this, &item] {
    if (!item.submitted || item.ended) return;
    item.stopped = true;
    ++seen_->cancelled;
    EXPECT_TRUE(cluster_.worker(item.from).cancel(item.id).ok());
  });
}

// One side disconnects in the middle, or both do.
void Schedule::plan_parting(Time start) {
  parts_ = true;
  std::mt19937_64 random(seed_);
  for (const size_t node : {size_t{0}, size_t{1}}) {
    if (random() % 3 == 0 && node != seed_ / 4 % 2) continue;
    leaves_[node] = true;
    by_program(node, start + microseconds(random() % 10'000),
               [this, node] { cluster_.worker(node).begin_disconnect(peers_[node]); });
  }
}

// Shorter than a peer is called again, or waited for.
void Schedule::plan_freezes(Time start) {
  std::mt19937_64 random(~seed_);
  for (size_t left = 1 + random() % 3; left > 0; --left) {
    // Who is started anew does not stand still as well.
    const size_t node = restarts_ ? 0 : random() % 2;
    const Time at = start + microseconds(random() % 10'000);
    const Time longest = random() % 6 == 0 ? seconds(1) : milliseconds(12);
    cluster_.fabric.freeze(node, at, at + Time(random() % static_cast<uint64_t>(longest.count())));
    ++seen_->frozen;
  }
}

// Where it is killed, somebody has to see that first.
void Schedule::plan_restart(Time start) {
  std::mt19937_64 random(seed_ * 3);
  crashes_ = random() % 2 == 0;
  const Time at = start + microseconds(random() % 8000);
  const Time pause = crashes_ ? microseconds(random() % 8000) : Time::zero();
  if (crashes_) cluster_.fabric.kill(1, at);
  cluster_.fabric.at(at + pause, [this] { start_anew(); });
}

void Schedule::by_program(size_t node, Time when, const std::function<void()>& task) {
  ++to_do_;
  cluster_.fabric.at(when, [this, node, task] {
    --to_do_;
    if (gone(node)) return;
    if (awake(node)) return task();
    by_program(node, cluster_.fabric.clock().now() + microseconds(100), task);
  });
}

void Schedule::submit(Item& item, Time timeout) {
  const size_t to = 1 - item.from;
  const bool write = item.op == Op::kWrite;
  TransferRequest request{.op = item.op,
                          .peer = peers_[item.from],
                          .local = cluster_.members[item.from].region,
                          .local_layout = write ? item.source.layout : item.target.layout,
                          .remote = remotes_[to],
                          .remote_layout = write ? item.target.layout : item.source.layout,
                          .increment = 7 + item.number,
                          .timeout = timeout,
                          .on_end = &Schedule::on_end,
                          .context = &item};
  item.stopped = timeout != kNever;
  if (write) {
    request.counter = item.remote_counter;
    request.notify = item.notify;
  }
  auto id = cluster_.worker(item.from).submit(request);
  if (!id.ok()) {
    EXPECT_TRUE(troubled()) << id.status();
    ++refused_;
    return;
  }
  item.submitted = true;
  item.id = *id;
}

void Schedule::on_end(void* context, TransferId, const absl::Status& status) {
  Item& item = *static_cast<Item*>(context);
  Schedule& schedule = *item.schedule;
  EXPECT_FALSE(item.ended);
  item.ended = true;
  item.result = status;
  ++schedule.ended_;
  schedule.seen_->done += status.ok();
  schedule.seen_->late += absl::IsDeadlineExceeded(status);
  const std::byte* target = schedule.target_of(item);
  item.at_end.assign(target, target + kBlock);
  // The pages are free again: whoever still sends them sends poison.
  std::byte* source = schedule.memory(item.source_node()) + item.number * kBlock;
  std::fill(source, source + kBlock, kPoison);
}

void Schedule::collect_notifications() {
  for (size_t node = 0; node < 2; ++node) {
    if (!awake(node)) continue;
    while (cluster_.worker(node).next_notification(notification_)) {
      EXPECT_FALSE(node == 1 && restarted_) << "of another: " << notification_.payload;
      const size_t number = std::stoul(notification_.payload);
      ASSERT_LT(number, kTransfers);
      Item& item = items_[number];
      EXPECT_EQ(item.target_node(), node);
      EXPECT_EQ(notification_.payload, item.notify);
      // Who reads it only after disconnect() finds its memory in use already.
      if (++item.notified == 1 && !item.parted) reuse(item);
    }
  }
}

// The target has got it, and needs the pages for the next.
void Schedule::reuse(Item& item) {
  for (size_t i = 0; i < item.bytes; ++i) {
    if (memory(item.target_node())[item.target.offsets[i]] != pattern(item.number, i)) {
      FAIL() << "byte " << i << " of transfer " << item.number << " is wrong when it is announced";
    }
  }
  std::fill_n(target_of(item), kBlock, kReused);
  ++seen_->reused;
}

// When disconnect() is over all pages of both sides are free. False: not over yet.
bool Schedule::look_for_parting() {
  for (size_t node = 0; node < 2; ++node) {
    if (!leaves_[node] || gone(node)) continue;
    Worker& worker = cluster_.worker(node);
    if (worker.peer_state(peers_[node]) != PeerState::kDown) return false;
    leaves_[node] = false;
    if (!worker.disconnect(peers_[node]).ok()) continue;
    ++seen_->parted;
    collect_notifications();
    for (Item& item : items_) {
      if (item.from == node && item.submitted) {
        EXPECT_TRUE(item.ended) << item.number;
      }
      item.parted = true;
      std::fill_n(target_of(item), kBlock, kReused);
      std::fill_n(memory(item.source_node()) + item.number * kBlock, kBlock, kPoison);
    }
  }
  return true;
}

// With whatever is open. All memory of the new one is its own.
void Schedule::start_anew() {
  collect_notifications();
  seen_->add(cluster_.worker(1).stats());
  ++(crashes_ ? seen_->crashed : seen_->left);
  cluster_.stop(1);
  restarted_ = true;
  cluster_.start(1, kBytes, 64);
  std::fill_n(memory(1), kBytes, kReused);
}

// It is met as any other, and takes what is for it. False: not yet.
bool Schedule::look_for_new_peer() {
  if (probed_) return true;
  if (!restarted_ || !awake(0)) return false;
  Worker& worker = cluster_.worker(0);
  if (!new_peer_ || worker.peer_state(*new_peer_) == PeerState::kDown) {
    EXPECT_FALSE(probe_ && !ended(*worker.state(*probe_)));
    probe_.reset();
    auto peer = worker.connect(cluster_.worker(1).address());
    EXPECT_TRUE(peer.ok()) << peer.status();
    new_peer_ = *peer;
  }
  if (worker.peer_state(*new_peer_) != PeerState::kUp) return false;
  if (!probe_) {
    TransferRequest request = cluster_.request(Op::kWrite, 0, *new_peer_, 1, kBlock);
    request.local_layout = request.remote_layout = Layout::contiguous(kProbe, kBlock);
    for (size_t i = 0; i < kBlock; ++i) memory(0)[kProbe + i] = pattern(kTransfers, i);
    probe_ = *worker.submit(request);
  }
  if (!ended(*worker.state(*probe_))) return false;
  EXPECT_TRUE(worker.status(*probe_).ok()) << worker.status(*probe_);
  EXPECT_TRUE(std::equal(memory(0) + kProbe, memory(0) + kProbe + kBlock, memory(1) + kProbe));
  seen_->new_peers += worker.status(*probe_).ok();
  return probed_ = true;
}

}  // namespace baton::sim
