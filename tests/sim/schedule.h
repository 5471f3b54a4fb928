// One seeded fault schedule over the simulated fabric: two workers write to each other and read,
// while links flap and lose, programs stand still, are killed or started anew, transfers are
// cancelled or run out of time, and sides disconnect. Whoever is told that bytes are there uses
// their memory for something else at once.
#pragma once

#include "tests/sim/cluster.h"
#include "tests/std.h"

namespace baton::sim {

// What the schedules have come to, to be added up: that they reached the states they are for.
struct Seen {
  uint64_t done = 0;
  uint64_t cancelled = 0;
  uint64_t late = 0;  // past their deadline
  uint64_t reused = 0;
  uint64_t parted = 0;
  uint64_t killed = 0;
  uint64_t frozen = 0;
  uint64_t crashed = 0;  // and started anew, with work open
  uint64_t left = 0;     // the same, in order
  uint64_t new_peers = 0;
  uint64_t receipts = 0;
  uint64_t slices_moved = 0;
  uint64_t peers_lost = 0;
  uint64_t peers_resumed = 0;
  SimStats fabric;

  void add(const WorkerStats& stats);
  void add(const SimStats& stats);
};

class Schedule {
 public:
  static constexpr size_t kTransfers = 32;

  explicit Schedule(uint64_t seed);
  // Runs it, checks everything, and adds what happened.
  void run(Seen& seen);

 private:
  static constexpr size_t kBlock = 24 << 10;  // each transfer has one of its own at either end
  static constexpr size_t kHalf = kBlock * kTransfers;  // sources first, then destinations
  static constexpr size_t kProbe = 2 * kHalf;           // for a peer that was started anew
  static constexpr size_t kBytes = kProbe + kBlock;

  // A random layout of some bytes inside [base, base + kBlock), and where each byte lies.
  struct Place {
    Layout layout;
    std::vector<uint32_t> pages;
    std::vector<size_t> offsets;
  };
  struct Item {
    Schedule* schedule = nullptr;
    size_t number = 0;
    size_t from = 0;  // the node that submits
    Op op = Op::kWrite;
    size_t bytes = 0;
    Place source;
    Place target;
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
    bool parted = false;  // and its pages are used for something else

    size_t source_node() const { return op == Op::kWrite ? from : 1 - from; }
    size_t target_node() const { return 1 - source_node(); }
  };

  size_t pick(size_t limit) { return static_cast<size_t>(random_() % limit); }
  Time uniform(Time limit);
  double probability(double limit);
  SimOptions conditions();
  static void place(Place& out, std::mt19937_64& random, size_t base, size_t bytes);
  std::byte pattern(size_t transfer, size_t at) const;

  void plan(size_t number, Time start);
  void plan_parting(Time start);
  void plan_freezes(Time start);
  void plan_restart(Time start);
  // By the program of a node, once it does not stand still; never, when it is another by then.
  void by_program(size_t node, Time when, const std::function<void()>& task);

  void submit(Item& item, Time timeout);
  static void on_end(void* context, TransferId, const absl::Status& status);
  void collect_notifications();
  void reuse(Item& item);
  bool look_for_parting();
  void start_anew();
  bool look_for_new_peer();
  bool over();

  void check(size_t number);
  void check_block(const Item& item);
  void check_word(const Item& item);
  void check_the_rest();
  // Somebody may fail without having been asked for it.
  bool troubled() const { return mortal_ || restarts_ || parts_; }

  std::byte* memory(size_t node) { return cluster_.members[node].memory.data(); }
  std::byte* target_of(const Item& item) {
    return memory(item.target_node()) + kHalf + item.number * kBlock;
  }
  // The worker that had begun: dead, or succeeded by another.
  bool gone(size_t node) { return node == 1 && (restarted_ || !cluster_.fabric.alive(1)); }
  bool awake(size_t node) { return cluster_.fabric.alive(node) && !cluster_.fabric.frozen(node); }

  const uint64_t seed_;
  std::mt19937_64 random_;
  const SimOptions options_;
  Time begun_{};
  std::array<PeerId, 2> peers_;
  std::array<RemoteRegion, 2> remotes_;
  std::array<Item, kTransfers> items_;
  Notification notification_;
  Seen* seen_ = nullptr;
  size_t to_do_ = 0;  // by programs
  size_t ended_ = 0;
  size_t refused_ = 0;
  bool mortal_ = false;
  bool parts_ = false;
  std::array<bool, 2> leaves_{};
  bool restarts_ = false;
  bool crashes_ = false;
  bool restarted_ = false;
  std::optional<PeerId> new_peer_;
  std::optional<TransferId> probe_;
  bool probed_ = false;
  SimCluster cluster_;  // last: its end ends what is open, which writes to the items
};

}  // namespace baton::sim
