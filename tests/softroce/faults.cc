// The list of fault cases.
#include "tests/softroce/faults.h"

#include <cstring>

namespace baton::softroce {
namespace {

#define BOTH(netem) "for r in rail0 rail1; do tc qdisc add dev $r root netem " netem "; done"
constexpr char kClean[] = "for r in rail0 rail1; do tc qdisc del dev $r root; done";

uint64_t mix(uint64_t x) {
  x ^= x >> 31;
  x *= 0x9e3779b97f4a7c15;
  x ^= x >> 29;
  return x;
}

}  // namespace

const std::vector<Case>& cases() {
  static const auto* const all = new std::vector<Case>{
      {.name = "none", .injected = "nothing", .pieces = 160},
      {.name = "delay",
       .injected = "netem delay 10ms, both rails, both directions",
       .here = BOTH("delay 10ms"),
       .there = BOTH("delay 10ms"),
       .undo_here = kClean,
       .undo_there = kClean,
       .before = true},
      {.name = "loss",
       .injected = "netem loss 1%, both rails, both directions",
       .here = BOTH("loss 1%"),
       .there = BOTH("loss 1%"),
       .undo_here = kClean,
       .undo_there = kClean,
       .before = true,
       .pieces = 32},
      {.name = "reorder",
       .injected = "netem delay 2ms reorder 25% 50%, both rails",
       .here = BOTH("delay 2ms reorder 25% 50%"),
       .undo_here = kClean,
       .before = true,
       .pieces = 32},
      {.name = "duplicate",
       .injected = "netem duplicate 5%, both rails, both directions",
       .here = BOTH("duplicate 5%"),
       .there = BOTH("duplicate 5%"),
       .undo_here = kClean,
       .undo_there = kClean,
       .before = true},
      {.name = "corrupt",
       .injected = "netem corrupt 1%, both rails",
       .here = BOTH("corrupt 1%"),
       .undo_here = kClean,
       .before = true,
       .pieces = 32},
      {.name = "link-down",
       .injected = "sender's link of rail 1 down, then up",
       .here = "ip link set rail1 down",
       .undo_here = "ip link set rail1 up",
       .predicted = Time(0),
       .loses_rail = true},
      {.name = "peer-link-down",
       .injected = "target's link of rail 1 down, then up",
       .there = "ip link set rail1 down",
       .undo_there = "ip link set rail1 up",
       .predicted = kRetriesExceeded,
       .loses_rail = true},
      {.name = "black-hole",
       .injected = "netem loss 100% on rail 1, then gone",
       .here = "tc qdisc add dev rail1 root netem loss 100%",
       .undo_here = "tc qdisc del dev rail1 root",
       .predicted = kRetriesExceeded,
       .loses_rail = true},
      {.name = "all-links-down",
       .injected = "both links of the target down, then up",
       .there = "ip link set rail0 down; ip link set rail1 down",
       .undo_there = "ip link set rail0 up; ip link set rail1 up",
       .predicted = kRetriesExceeded,
       .outage = kRedial / 4,
       .loses_rail = true},
      {.name = "stopped",
       .injected = "target stopped (SIGSTOP), then continued",
       .there = "kill -STOP $(cat $board/pid)",
       .undo_there = "kill -CONT $(cat $board/pid)",
       .outcome = Outcome::kInTime,
       .predicted = kPieceDeadline},
      {.name = "killed",
       .injected = "target killed (SIGKILL), then started anew",
       .there = "kill -KILL $(cat $board/pid)",
       .outcome = Outcome::kLost,
       .predicted = kRedial,
       .restart = true,
       .same_peer_after = false},
      {.name = "power-off",
       .injected = "the target's machine loses its power",
       .there = "poweroff",
       .outcome = Outcome::kLost,
       .predicted = kWatchdog + kRedial,
       .same_peer_after = false},
  };
  return *all;
}

WorkerOptions worker_options(const std::string& name, const std::string& host) {
  WorkerOptions options;
  options.name = name;
  options.key = *ClusterKey::from_bytes("a secret of the fault cases");
  options.providers = {"verbs"};
  options.listen_host = host;
  options.settings = {{"verbs.timeout", "14"},
                      {"verbs.retry_count", "6"},
                      {"peer.redial_ms", std::to_string(kRedial.count() / 1'000'000)}};
  return options;
}

void fill_piece(std::byte* data, uint64_t piece, uint64_t round) {
  for (size_t i = 0; i < kPieceBytes / 8; ++i) {
    const uint64_t word = mix((piece << 48) ^ (round << 32) ^ i);
    std::memcpy(data + 8 * i, &word, 8);
  }
}

bool piece_holds(const std::byte* data, uint64_t piece, uint64_t round) {
  for (size_t i = 0; i < kPieceBytes / 8; ++i) {
    uint64_t word = 0;
    std::memcpy(&word, data + 8 * i, 8);
    if (word != mix((piece << 48) ^ (round << 32) ^ i)) return false;
  }
  return true;
}

}  // namespace baton::softroce
