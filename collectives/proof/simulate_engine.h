// The engine of the simulator: events in the order of their time, over any kind of time.
//
// Instant is double, or a type that also remembers what its seconds are made of (see
// cost_model_shape.cc). It needs spend(Instant&, Spent, amount, seconds) and seconds_of(Instant).
#pragma once

#include <algorithm>
#include <cstdint>
#include <queue>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "collectives/proof/simulate.h"
#include "collectives/proof/simulate_programs.h"

namespace baton::collectives::proof {

// What time is spent on.
enum Spent : int { kLocalAlpha, kRemoteAlpha, kLocalBytes, kRemoteBytes, kCombinedBytes, kSteps };
inline constexpr int kSpentKinds = 6;

inline void spend(double& instant, Spent, double, double seconds) { instant += seconds; }
inline double seconds_of(double instant) { return instant; }

template <typename Instant>
class SimulateEngine {
 public:
  SimulateEngine(const SimulatedPrograms& programs, const SimulateOptions& options)
      : programs_(programs),
        options_(options),
        cut_(programs.cut(options.bytes, options.piece_bytes)),
        lanes_(static_cast<uint32_t>(std::min<size_t>(options.lanes, cut_.pieces))),
        rank_lanes_(size_t{programs.ranks} * lanes_),
        ranks_(programs.ranks),
        queues_(programs.pairs.size() * lanes_),
        slots_(queues_.size() * options.messages_ahead),
        piece_done_(cut_.pieces) {}

  absl::Status run() {
    for (size_t at = 0; at < rank_lanes_.size(); ++at) {
      const size_t rank = at / lanes_, lane = at % lanes_;
      RankLane& state = rank_lanes_[at];
      state.piece = lane;
      begin_piece(rank, state);
      Instant start{};
      if (!options_.late.empty()) spend(start, kSteps, 0, options_.late[rank]);
      push({start, Event::Kind::kStep, at});
    }
    while (!events_.empty()) {
      const Event event = events_.top();
      events_.pop();
      if (event.kind == Event::Kind::kAtPort) {
        enter_port(event);
      } else {
        run_lane(event.at, event.index);
      }
    }
    for (size_t at = 0; at < rank_lanes_.size(); ++at) {
      const RankLane& lane = rank_lanes_[at];
      if (lane.piece >= cut_.pieces) continue;
      const SimulatedStep& step = programs_.steps[lane.next];
      const SimulatedPair& pair = programs_.pairs[step.pair];
      const size_t rank = at / lanes_;
      const bool sends = step.kind == static_cast<uint32_t>(schedules::Step::Kind::kSend);
      return absl::InternalError(absl::StrFormat(
          "rank %d waits for ever in step %d of piece %d, %s rank %u: the programs do not match",
          rank, lane.next - start_of(rank, lane.piece), lane.piece,
          sends ? "for room to send to" : "for a message from", sends ? pair.target : pair.source));
    }
    return absl::OkStatus();
  }

  uint64_t messages() const { return messages_; }
  uint64_t bytes_sent(size_t rank) const { return ranks_[rank].sent; }
  uint64_t bytes_received(size_t rank) const { return ranks_[rank].received; }
  const Instant& done(size_t rank) const { return ranks_[rank].done; }
  // When all ranks had done their last step for it.
  const Instant& piece_done(size_t piece) const { return piece_done_[piece]; }

 private:
  struct Event {
    enum class Kind : uint8_t { kStep, kAtPort };
    Instant at{};
    Kind kind = Kind::kStep;
    size_t index = 0;    // in rank_lanes_ or in slots_
    uint64_t order = 0;  // events of one instant run in the order in which they were made
    bool operator<(const Event& other) const {
      const double mine = seconds_of(at), theirs = seconds_of(other.at);
      return mine != theirs ? mine > theirs : order > other.order;
    }
  };
  struct RankLane {
    size_t piece = 0;
    size_t next = 0;  // in programs_.steps
    size_t end = 0;
  };
  struct Rank {
    Instant core_free{};
    Instant out_free[2]{};  // local, remote
    Instant in_free[2]{};
    Instant done{};
    uint64_t sent = 0;
    uint64_t received = 0;
  };
  // The messages from one rank to another in one lane. Message j uses slot j % messages_ahead.
  struct Queue {
    uint64_t sent = 0;
    uint64_t arrived = 0;
    uint64_t taken = 0;
    bool sender_waits = false;
    bool receiver_waits = false;
  };
  struct Slot {
    Instant arrives{};  // at the port and then, once it has passed it, in memory
    Instant free_at{};  // the sender knows that it may use the slot again
    size_t bytes = 0;
  };

  static const Instant& later(const Instant& a, const Instant& b) {
    return seconds_of(a) < seconds_of(b) ? b : a;
  }
  bool local(const SimulatedPair& pair) const {
    return pair.source / options_.cost.node_size == pair.target / options_.cost.node_size;
  }
  size_t start_of(size_t rank, size_t piece) const {
    return programs_.starts[rank * programs_.channels + piece % programs_.channels];
  }
  void push(Event event) {
    event.order = ++order_;
    events_.push(event);
  }
  void add_alpha(Instant& at, bool is_local) const {
    spend(at, is_local ? kLocalAlpha : kRemoteAlpha, 1,
          is_local ? options_.cost.local.alpha : options_.cost.remote.alpha);
  }
  void add_wire(Instant& at, bool is_local, size_t bytes) const {
    const double beta = is_local ? options_.cost.local.beta : options_.cost.remote.beta;
    const auto amount = static_cast<double>(bytes);
    spend(at, is_local ? kLocalBytes : kRemoteBytes, amount, amount * beta);
  }

  // Skips programs without steps.
  void begin_piece(size_t rank, RankLane& lane) {
    for (; lane.piece < cut_.pieces; lane.piece += lanes_) {
      lane.next = start_of(rank, lane.piece);
      const size_t program = rank * programs_.channels + lane.piece % programs_.channels;
      lane.end = programs_.starts[program + 1];
      if (lane.next != lane.end) return;
    }
  }

  // Runs the lane's steps until it must wait or something else comes first.
  void run_lane(Instant now, size_t index) {
    const size_t rank = index / lanes_;
    RankLane& lane = rank_lanes_[index];
    while (lane.piece < cut_.pieces) {
      if (!run_step(rank, index, lane, now)) return;
      if (++lane.next == lane.end) {
        piece_done_[lane.piece] = later(piece_done_[lane.piece], now);
        lane.piece += lanes_;
        begin_piece(rank, lane);
      }
      if (!events_.empty() && seconds_of(events_.top().at) <= seconds_of(now)) {
        return push({now, Event::Kind::kStep, index});
      }
    }
    ranks_[rank].done = later(ranks_[rank].done, now);
  }

  // Runs the next step from `now` on and moves `now` to its end. False if it must wait, in which
  // case an event will come.
  bool run_step(size_t rank, size_t index, const RankLane& lane, Instant& now) {
    const SimulatedStep& step = programs_.steps[lane.next];
    const auto kind = static_cast<schedules::Step::Kind>(step.kind);
    const size_t bytes = programs_.bytes_of(step, cut_, lane.piece);
    if (kind == schedules::Step::Kind::kSend) return send(rank, index, step, bytes, now);
    if (kind == schedules::Step::Kind::kReceive || kind == schedules::Step::Kind::kReceiveReduce) {
      return receive(rank, index, step, kind == schedules::Step::Kind::kReceiveReduce ? bytes : 0,
                     now);
    }
    work(rank, bytes, now);
    return true;
  }

  // One step of the rank's core, which does one thing at a time.
  void work(size_t rank, size_t combined, Instant& now) {
    Instant& core_free = ranks_[rank].core_free;
    core_free = later(now, core_free);
    spend(core_free, kSteps, 1, options_.cost.step);
    if (combined > 0) {
      const auto amount = static_cast<double>(combined);
      spend(core_free, kCombinedBytes, amount, amount * options_.cost.gamma);
    }
    now = core_free;
  }

  // The lane of a rank that runs this queue.
  size_t rank_lane(uint32_t rank, size_t queue) const {
    return size_t{rank} * lanes_ + queue % lanes_;
  }

  bool send(size_t rank, size_t index, const SimulatedStep& step, size_t bytes, Instant& now) {
    const size_t at = size_t{step.pair} * lanes_ + index % lanes_;
    Queue& queue = queues_[at];
    if (queue.sent - queue.taken >= options_.messages_ahead) {
      queue.sender_waits = true;
      return false;
    }
    const size_t slot_index = at * options_.messages_ahead + queue.sent % options_.messages_ahead;
    Slot& slot = slots_[slot_index];
    if (seconds_of(slot.free_at) > seconds_of(now)) {
      push({slot.free_at, Event::Kind::kStep, index});
      return false;
    }
    work(rank, 0, now);
    const SimulatedPair& pair = programs_.pairs[step.pair];
    const bool is_local = local(pair);
    Rank& self = ranks_[rank];
    Instant& port = self.out_free[is_local ? 0 : 1];
    const Instant begins = options_.contention ? later(now, port) : now;
    Instant leaves = begins;
    add_wire(leaves, is_local, bytes);
    port = leaves;
    self.done = later(self.done, leaves);
    self.sent += bytes;
    ++messages_;
    ++queue.sent;
    slot.bytes = bytes;
    slot.arrives = options_.contention ? begins : leaves;
    add_alpha(slot.arrives, is_local);
    if (options_.contention) {
      push({slot.arrives, Event::Kind::kAtPort, slot_index});
    } else {
      arrived(at, slot);
    }
    return true;
  }

  // The first byte of a message is at the receiver's port and waits for its turn.
  void enter_port(const Event& event) {
    Slot& slot = slots_[event.index];
    const size_t at = event.index / options_.messages_ahead;
    const SimulatedPair& pair = programs_.pairs[at / lanes_];
    const bool is_local = local(pair);
    Instant& port = ranks_[pair.target].in_free[is_local ? 0 : 1];
    port = later(slot.arrives, port);
    add_wire(port, is_local, slot.bytes);
    slot.arrives = port;
    arrived(at, slot);
  }

  void arrived(size_t at, const Slot& slot) {
    Queue& queue = queues_[at];
    const uint32_t target = programs_.pairs[at / lanes_].target;
    ranks_[target].received += slot.bytes;
    ++queue.arrived;
    if (!queue.receiver_waits) return;
    queue.receiver_waits = false;
    push({slot.arrives, Event::Kind::kStep, rank_lane(target, at)});
  }

  bool receive(size_t rank, size_t index, const SimulatedStep& step, size_t combined,
               Instant& now) {
    const size_t at = size_t{step.pair} * lanes_ + index % lanes_;
    Queue& queue = queues_[at];
    if (queue.arrived == queue.taken) {
      queue.receiver_waits = true;
      return false;
    }
    Slot& slot = slots_[at * options_.messages_ahead + queue.taken % options_.messages_ahead];
    if (seconds_of(slot.arrives) > seconds_of(now)) {
      push({slot.arrives, Event::Kind::kStep, index});
      return false;
    }
    work(rank, combined, now);
    const SimulatedPair& pair = programs_.pairs[step.pair];
    slot.free_at = now;
    add_alpha(slot.free_at, local(pair));
    ++queue.taken;
    if (queue.sender_waits) {
      queue.sender_waits = false;
      push({slot.free_at, Event::Kind::kStep, rank_lane(pair.source, at)});
    }
    return true;
  }

  const SimulatedPrograms& programs_;
  const SimulateOptions& options_;
  const SimulatedPrograms::Cut cut_;
  const uint32_t lanes_;
  std::vector<RankLane> rank_lanes_;
  std::vector<Rank> ranks_;
  std::vector<Queue> queues_;  // of pair p in lane l: [p * lanes + l]
  std::vector<Slot> slots_;
  std::vector<Instant> piece_done_;
  std::priority_queue<Event> events_;
  uint64_t order_ = 0;
  uint64_t messages_ = 0;
};

}  // namespace baton::collectives::proof
