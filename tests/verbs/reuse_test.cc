// Seeded fault schedules over verbs in which the target needs each block for something else as soon
// as it has been told that its bytes are there. Adapters write without the target's processor: what
// is repeated after that, or still moves on a lost rail, would be found in memory that is in use.
//
// tests/seeds.h says which ones run.
#include "tests/fault_schedule.h"
#include "tests/sanitized.h"
#include "tests/verbs/verbs_pair.h"

namespace baton {
namespace {

constexpr size_t kTransfers = 32;
constexpr uint64_t kSeeds = kSanitized ? 60 : 510;
constexpr uint64_t kEnough = 500;

struct Seen : FaultsSeen {
  uint64_t flushed = 0;
  uint64_t landed_late = 0;  // from queue pairs that had ended
};

class Schedule : public FaultSchedule {
 public:
  Schedule(uint64_t seed, Seen& seen)
      : FaultSchedule(seed, kTransfers, 64 << 10, seen),
        seen_(seen),
        devices_(1 + pick(3)),
        pair_(network(), settings()) {
    pair_.tick = std::chrono::microseconds(100 + pick(200));
    pair_.expect_ready = false;  // a rail that is lost may have used them up
    if (pick(2) == 0) pair_.fake->set_late_packets(static_cast<int>(1 + pick(400)));
  }

  void run() {
    pair_.connect();
    for (size_t i = 0; i < 2; ++i) {
      VerbsPair::Side& side = i == 0 ? pair_.a : pair_.b;
      sides_[i] = {side.worker.get(), side.memory.data(), side.region, side.remote, side.peer};
    }
    plan();
    for (size_t next = 0; next < kTransfers;) {
      for (size_t more = pick(12); more > 0 && next < kTransfers; --more) {
        submit(items_[next++], pick(12) == 0 ? std::chrono::microseconds(pick(20'000)) : kNever);
      }
      steps(pick(12));
      const size_t device = pick(devices_);
      const bool all = pick(3) == 0;
      const size_t kind = pick(7);
      for (size_t each = 0; each < devices_; ++each) {
        if (all || each == device) break_it(kind, each);
      }
      steps(pick(150));
      if (pick(3) == 0) cancel(items_[pick(kTransfers)]);
      steps(pick(150));
      for (size_t each = 0; each < devices_; ++each) undo(each);
      steps(pick(20));
    }
    pair_.until([&] {
      look();
      return all_ended();
    });
    for (int i = 0; i < 300; ++i) both();
    check();
    for (const Side& side : sides_) seen_.add(side.worker->stats());
    seen_.flushed += pair_.fake->stats().flushed;
    seen_.landed_late += pair_.fake->stats().landed_late;
  }

 private:
  bool deaf() override { return completions_lost_; }

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
        sides_[who - 2].worker->progress();
        look();
      }
    }
  }
  void both() {
    pair_.step();
    look();
  }

  Seen& seen_;
  const size_t devices_;
  // What an adapter had acknowledged, and written into a queue that broke, its program never sees.
  bool completions_lost_ = false;
  VerbsPair pair_;
};

// Promise(rdma): A late packet of an ended queue pair changes no reused memory | 510 schedules with
//   packets that outlive their queue pair
// Promise(rdma): A counter raised by an immediate rises once, whatever rails are lost | the target
//   reports how many of the lost rail it had counted
TEST(Reuse, ALatePacketChangesNoReusedMemory) {
  const Seeds seeds(kSeeds);
  Seen seen;
  if (!run_schedules<Schedule>(seeds.begin, seeds.end, seen)) return;
  // The schedules did what they are for; a few dozen need not.
  if (seeds.count() < kEnough) return;
  expect_all_seen({{"cancelled", seen.cancelled},
                   {"told before the end", seen.told_before_the_end},
                   {"rails lost", seen.rails_lost},
                   {"peers lost", seen.peers_lost},
                   {"slices moved", seen.slices_moved},
                   {"receipts", seen.receipts},
                   {"flushed", seen.flushed},
                   {"landed late", seen.landed_late}});
}

}  // namespace
}  // namespace baton
