// Thousands of seeded fault schedules: whatever the network does, every transfer ends, what is done
// is exact, after its end no byte of a transfer moves, and none after its target has heard that it
// is there: from then on the target uses the memory for something else.
//
// tests/seeds.h says which ones run.
#include "tests/fault_schedule.h"
#include "tests/sanitized.h"
#include "tests/sim/cluster.h"

namespace baton::sim {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr uint64_t kPerShard = kSanitized ? 25 : 250;
constexpr uint64_t kEnough = 200;
// All of it is in one thread, where the thread sanitizer finds little and takes longest.
constexpr int kShards = kThreadSanitized ? 6 : 20;

constexpr size_t kTransfers = 32;

struct Seen : FaultsSeen {
  uint64_t killed = 0;
  uint64_t frozen = 0;
  uint64_t crashed = 0;  // and started anew, with work open
  uint64_t left = 0;     // the same, in order
  uint64_t new_peers = 0;
  uint64_t packets_lost = 0, duplicated = 0, reordered = 0, timeouts = 0;
};

// Links flap and lose, programs stand still, are killed or started anew, transfers are cancelled or
// run out of time, and sides disconnect.
class Schedule : public FaultSchedule {
 public:
  Schedule(uint64_t seed, Seen& seen)
      : FaultSchedule(seed, kTransfers, 24 << 10, seen),
        seen_(seen),
        options_(conditions()),
        probe_at_(2 * half_),
        // A third of them may have notifications that have not ended.
        cluster_(options_, probe_at_ + block_, 4 * kTransfers) {}

  void run() {
    for (size_t node = 0; node < 2; ++node) take(node);
    std::tie(sides_[0].peer, sides_[1].peer) = cluster_.connect(0, 1);
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
      ++seen_.killed;
      fabric.kill(1, death);
    }
    plan();
    for (Item& item : items_) plan_program(item);
    if (seed_ % 4 == 3) plan_parting(begun_);
    if (seed_ % 8 == 1 || seed_ % 8 >= 4) plan_freezes(begun_);
    if (restarts_) plan_restart(begun_);

    const bool all = fabric.run_until([&] { return over(); }, seconds(30));
    EXPECT_TRUE(all) << ended_ << " ended, " << refused_ << " refused of " << kTransfers << "; "
                     << cluster_.worker(0).explain(sides_[0].peer);
    if (!all && new_peer_) ADD_FAILURE() << cluster_.worker(0).explain(*new_peer_);
    fabric.run_for(milliseconds(50));  // whatever is still on the wires
    check();
    EXPECT_THAT(fabric.violations(), testing::IsEmpty());
    for (size_t node = 0; node < 2; ++node) {
      seen_.add(cluster_.worker(node).stats());
      if (!fabric.alive(node)) continue;
      EXPECT_EQ(cluster_.worker(node).stats().open_transfers, 0u);
    }
    const SimStats stats = fabric.stats();
    seen_.packets_lost += stats.lost;
    seen_.duplicated += stats.duplicated;
    seen_.reordered += stats.reordered;
    seen_.timeouts += stats.timeouts;
    seen_.rails_lost += stats.rails_lost;
  }

 private:
  bool gone(size_t node) override { return node == 1 && (restarted_ || !cluster_.fabric.alive(1)); }
  bool replaced(size_t node) override { return node == 1 && restarted_; }
  bool awake(size_t node) override {
    return cluster_.fabric.alive(node) && !cluster_.fabric.frozen(node);
  }
  bool troubled() override { return mortal_ || restarts_ || parts_; }

  // The worker of a node, with its memory. Of one that is started anew peers still name the first.
  void take(size_t node) {
    SimCluster::Member& member = cluster_.members[node];
    sides_[node].worker = member.worker.get();
    sides_[node].memory = member.memory.data();
    if (restarted_) return;
    sides_[node].region = member.region;
    sides_[node].remote = member.remote;
  }

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

  bool over() {
    look();
    if (!look_for_parting()) return false;
    if (restarts_ && !look_for_new_peer()) return false;
    if (to_do_ > 0 || cluster_.fabric.clock().now() <= begun_ + milliseconds(11)) return false;
    if (cluster_.fabric.frozen(0) || cluster_.fabric.frozen(1)) return false;
    return all_ended();
  }

  void plan_program(Item& item) {
    const Time when = begun_ + uniform(milliseconds(8));
    const Time timeout = pick(8) == 0 ? uniform(milliseconds(4)) : kNever;
    by_program(item.from, when, [this, &item, timeout] { submit(item, timeout); });
    if (pick(5) != 0) return;
    by_program(item.from, when + uniform(milliseconds(3)), [this, &item] { cancel(item); });
  }

  // One side disconnects in the middle, or both do.
  void plan_parting(Time start) {
    parts_ = true;
    std::mt19937_64 random(seed_);
    for (const size_t node : {size_t{0}, size_t{1}}) {
      if (random() % 3 == 0 && node != seed_ / 4 % 2) continue;
      leaves_[node] = true;
      by_program(node, start + microseconds(random() % 10'000),
                 [this, node] { cluster_.worker(node).begin_disconnect(sides_[node].peer); });
    }
  }

  // Shorter than a peer is called again, or waited for.
  void plan_freezes(Time start) {
    std::mt19937_64 random(~seed_);
    for (size_t left = 1 + random() % 3; left > 0; --left) {
      // Who is started anew does not stand still as well.
      const size_t node = restarts_ ? 0 : random() % 2;
      const Time at = start + microseconds(random() % 10'000);
      const Time longest = random() % 6 == 0 ? seconds(1) : milliseconds(12);
      cluster_.fabric.freeze(node, at,
                             at + Time(random() % static_cast<uint64_t>(longest.count())));
      ++seen_.frozen;
    }
  }

  // Where it is killed, somebody has to see that first.
  void plan_restart(Time start) {
    std::mt19937_64 random(seed_ * 3);
    crashes_ = random() % 2 == 0;
    const Time at = start + microseconds(random() % 8000);
    const Time pause = crashes_ ? microseconds(random() % 8000) : Time::zero();
    if (crashes_) cluster_.fabric.kill(1, at);
    cluster_.fabric.at(at + pause, [this] { start_anew(); });
  }

  void by_program(size_t node, Time when, const std::function<void()>& task) {
    ++to_do_;
    cluster_.fabric.at(when, [this, node, task] {
      --to_do_;
      if (gone(node)) return;
      if (awake(node)) return task();
      by_program(node, cluster_.fabric.clock().now() + microseconds(100), task);
    });
  }

  // False: not over yet.
  bool look_for_parting() {
    for (size_t node = 0; node < 2; ++node) {
      if (!leaves_[node] || gone(node)) continue;
      Worker& worker = cluster_.worker(node);
      if (worker.peer_state(sides_[node].peer) != PeerState::kDown) return false;
      leaves_[node] = false;
      if (worker.disconnect(sides_[node].peer).ok()) part(node);
    }
    return true;
  }

  // With whatever is open. All memory of the new one is its own.
  void start_anew() {
    look();
    seen_.add(cluster_.worker(1).stats());
    ++(crashes_ ? seen_.crashed : seen_.left);
    cluster_.stop(1);
    restarted_ = true;
    cluster_.start(1, probe_at_ + block_, 64);
    take(1);
    std::fill_n(sides_[1].memory, probe_at_ + block_, kReused);
  }

  // It is met as any other, and takes what is for it. False: not yet.
  bool look_for_new_peer() {
    if (probed_) return true;
    if (!restarted_ || !awake(0)) return false;
    Worker& worker = cluster_.worker(0);
    if (!new_peer_ || worker.peer_state(*new_peer_) == PeerState::kDown) {
      EXPECT_FALSE(probe_ && !ended(*worker.state(*probe_)));
      probe_.reset();
      new_peer_ = must(worker.connect(cluster_.worker(1).address()));
    }
    if (worker.peer_state(*new_peer_) != PeerState::kUp) return false;
    if (!probe_) {
      TransferRequest request = cluster_.request(Op::kWrite, 0, *new_peer_, 1, block_);
      request.local_layout = request.remote_layout = Layout::contiguous(probe_at_, block_);
      for (size_t i = 0; i < block_; ++i) sides_[0].memory[probe_at_ + i] = pattern(kTransfers, i);
      probe_ = *worker.submit(request);
    }
    if (!ended(*worker.state(*probe_))) return false;
    EXPECT_TRUE(worker.status(*probe_).ok()) << worker.status(*probe_);
    EXPECT_TRUE(std::equal(sides_[0].memory + probe_at_, sides_[0].memory + probe_at_ + block_,
                           sides_[1].memory + probe_at_));
    seen_.new_peers += worker.status(*probe_).ok();
    return probed_ = true;
  }

  Seen& seen_;
  const SimOptions options_;
  const size_t probe_at_;  // a block for a peer that was started anew
  Time begun_{};
  size_t to_do_ = 0;  // by programs
  bool mortal_ = false;
  bool parts_ = false;
  std::array<bool, 2> leaves_{};
  bool restarts_ = false;
  bool crashes_ = false;
  bool restarted_ = false;
  std::optional<PeerId> new_peer_;
  std::optional<TransferId> probe_;
  bool probed_ = false;
  SimCluster cluster_;
};

class FaultSchedules : public testing::TestWithParam<int> {};

// Promise(lost): In 5,000 seeded schedules of kills, cuts, stops and deadlines each transfer ends
//   once and nothing lands late, with every block reused at once | sessions, receipts and fences
// Promise(lost): A restarted process is a different peer: nothing of the old one lands in the new
//   one | each process draws a new uid; regions have keys
TEST_P(FaultSchedules, EveryTransferEndsExactly) {
  const Seeds seeds(kPerShard * kShards);
  // Neighbours differ in kind, so a shard has a stretch of them.
  const uint64_t per_shard = (seeds.count() + kShards - 1) / kShards;
  const uint64_t begin = seeds.begin + static_cast<uint64_t>(GetParam()) * per_shard;
  const uint64_t end = std::min(begin + per_shard, seeds.end);
  Seen sum;
  // A few dozen need not reach all states.
  if (!run_schedules<Schedule>(begin, end, sum) || end < begin + kEnough) return;
  EXPECT_GT(sum.done, (end - begin) * kTransfers / 2);
  expect_all_seen({{"cancelled", sum.cancelled},
                   {"past their deadline", sum.late},
                   {"blocks reused", sum.reused},
                   {"parted", sum.parted},
                   {"killed", sum.killed},
                   {"times frozen", sum.frozen},
                   {"crashed and started anew", sum.crashed},
                   {"left and started anew", sum.left},
                   {"new peers that took something", sum.new_peers},
                   {"receipts", sum.receipts},
                   {"slices that went again", sum.slices_moved},
                   {"peers lost", sum.peers_lost},
                   {"peers resumed", sum.peers_resumed},
                   {"packets lost", sum.packets_lost},
                   {"packets repeated", sum.duplicated},
                   {"packets reordered", sum.reordered},
                   {"timeouts", sum.timeouts},
                   {"rails lost", sum.rails_lost}});
}

INSTANTIATE_TEST_SUITE_P(Seeds, FaultSchedules, testing::Range(0, kShards));

}  // namespace
}  // namespace baton::sim
