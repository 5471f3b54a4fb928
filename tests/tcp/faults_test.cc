// Seeded fault schedules over real sockets: connections are cut at any byte, acknowledgements held
// back, either side sleeps, transfers are cancelled and run out of time, and a target reuses its
// memory as soon as it has been told that it may. Nothing is lost, repeated, late or hung.
//
// tests/seeds.h says which ones run.
#include "tests/fault_schedule.h"
#include "tests/sanitized.h"
#include "tests/tcp/faulty_network.h"
#include "tests/tcp/tcp_pair.h"
#include "tests/test.h"

namespace baton::tcp {
namespace {

using std::chrono::milliseconds;

constexpr size_t kTransfers = 24;

struct Seen : FaultsSeen {
  size_t cuts = 0;
};

class Schedule : public FaultSchedule {
 public:
  Schedule(uint64_t seed, Seen& seen)
      : FaultSchedule(seed, kTransfers, 96 << 10, seen), seen_(seen) {
    const std::string sockets = std::to_string(1 + pick(3));
    const std::string slice = std::to_string(4 << pick(4));
    for (size_t i = 0; i < 2; ++i) {
      auto worker = Worker::create(
          {.name = "side",
           .providers = {"tcp"},
           .key = *ClusterKey::from_bytes("0123456789abcdef"),
           .clock = &clock_,
           .max_transfers = 96,
           .settings = {
               {"tcp.sockets", sockets}, {"tcp.slice_kib", slice}, {"tcp.buffer_kib", "16"}}});
      workers_[i] = *std::move(worker);
      memory_[i].resize(2 * half_);
      const auto region = workers_[i]->register_memory(memory_[i].data(), memory_[i].size());
      sides_[i] = {.worker = workers_[i].get(),
                   .memory = memory_[i].data(),
                   .region = *region,
                   .remote = *workers_[i]->remote_region(*region)};
    }
    network_ = std::make_unique<FaultyNetwork>(workers_[1]->address());
    sides_[0].peer = *workers_[0]->connect(network_->address());
  }

  void run() {
    until([&] { return sides_[1].peer.generation != 0; });
    plan();
    size_t next = 0;
    for (int round = 0; round < 400; ++round) {
      if (next < kTransfers && pick(4) == 0) submit_next(next++);
      disturb();
      step();
      if (pick(8) == 0) clock_.advance(milliseconds(1));
    }
    network_->hold(FaultyNetwork::kThere, false);
    network_->hold(FaultyNetwork::kBack, false);
    asleep_ = {};
    while (next < kTransfers) submit_next(next++);
    if (pick(3) == 0) leaves_ = {pick(3) == 0, true};
    left_ = leaves_[1];
    for (size_t i = 0; i < 2; ++i) {
      if (leaves_[i]) workers_[i]->begin_disconnect(sides_[i].peer);
    }
    until([&] {
      if (++quiet_ % 8 == 0) clock_.advance(milliseconds(1));  // nothing has moved for a while
      return parted() && all_ended();
    });
    for (int quiet = 0; quiet < 100; ++quiet) {
      if (step()) quiet = 0;
    }
    check();
    seen_.add(workers_[0]->stats());
  }

 private:
  bool awake(size_t which) override { return asleep_[which] == 0; }
  bool troubled() override { return left_; }

  void submit_next(size_t number) {
    submit(items_[number], pick(6) == 0 ? milliseconds(pick(30)) : kNever);
  }

  void disturb() {
    std::vector<FaultyNetwork::Line>& lines = network_->lines();
    FaultyNetwork::Line& line = lines[pick(lines.size())];
    switch (pick(40)) {
      case 0:
        seen_.cuts += line.open();
        network_->cut(line);
        break;
      case 1:
        seen_.cuts += line.open();
        if (line.open()) network_->cut_near(line);
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
        cancel(items_[pick(kTransfers)]);
        break;
      default:
        break;
    }
  }

  bool step() {
    bool any = network_->step();
    for (size_t i = 0; i < 2; ++i) {
      if (asleep_[i] > 0 && asleep_[i]-- > 0) continue;
      any |= workers_[i]->progress();
      while (auto event = workers_[i]->next_peer_event()) sides_[i].peer = event->peer;
    }
    look();
    if (any) quiet_ = 0;
    return any;
  }
  // The workers' clock is the test's; the kernel has its own.
  template <typename Ready>
  void until(const Ready& ready, CallSite from = CallSite::here()) {
    const auto state = [&] { return state_of(*workers_[0], sides_[0].peer, "a"); };
    baton::until(
        ready, [&] { step(); }, state, from);
  }

  bool parted() {
    for (size_t i = 0; i < 2; ++i) {
      Worker& worker = *workers_[i];
      if (!leaves_[i]) continue;
      if (worker.peer_state(sides_[i].peer) != PeerState::kDown) return false;
      leaves_[i] = false;
      step();
      EXPECT_EQ(worker.disconnect(sides_[i].peer), absl::OkStatus());
      part(i);
    }
    return true;
  }

  Seen& seen_;
  ManualClock clock_;
  std::array<int, 2> asleep_{};
  std::array<bool, 2> leaves_{};
  bool left_ = false;
  uint64_t quiet_ = 0;
  std::unique_ptr<FaultyNetwork> network_;
  std::array<std::vector<std::byte>, 2> memory_;
  std::array<std::unique_ptr<Worker>, 2> workers_;
};

TEST(TcpFaults, EveryTransferEndsExactlyOnce) {
  const Seeds seeds(kSanitized ? 40 : 300);
  Seen seen;
  if (!run_schedules<Schedule>(seeds.begin, seeds.end, seen) || seeds.one) return;
  // The schedules did what they are for.
  EXPECT_GT(seen.done, seeds.count() * kTransfers / 2);
  EXPECT_GT(seen.cuts, seeds.count());
  expect_all_seen({{"parted", seen.parted},
                   {"peers resumed", seen.peers_resumed},
                   {"slices moved", seen.slices_moved}});
}

}  // namespace
}  // namespace baton::tcp
