// The inside of a SimFabric: virtual time, events, nodes, links and the queue pairs on them.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/sim/fabric/fabric.h"
#include "tests/sim/fabric/wire.h"

namespace baton::sim {

class QueuePair;
class SimProvider;

class SimNetwork {
 public:
  explicit SimNetwork(const SimOptions& options);
  ~SimNetwork();

  const SimOptions& options() const { return options_; }
  Time now() const { return clock_.time; }
  const Clock& clock() const { return clock_; }
  SimStats& stats() { return stats_; }

  // --- events, run in order of time, those of one time in the order they were scheduled ---
  void at(Time when, std::function<void()> task) { push_task(when, std::move(task), true); }
  // A task that is no news for a worker, but for what it puts in an inbox.
  void at_quietly(Time when, std::function<void()> task) {
    push_task(when, std::move(task), false);
  }
  void at_transmitted(Time when, SimWire& wire, const SimPacket& packet);
  void at_arrival(Time when, const SimPacket& packet);
  void at_timer(Time when, uint32_t queue_pair);
  Time next_event() const { return events_.empty() ? kNever : events_.front().at; }
  // Moves time forward to `time` (no event may lie before it) and runs what is due then.
  void advance_to(Time time);

  // --- nodes ---
  bool alive(size_t node) const { return nodes_[node].alive; }
  void kill(size_t node) { nodes_[node].alive = false; }
  // Its adapter goes on, its program does not.
  bool frozen(size_t node) const { return nodes_[node].frozen > 0; }
  void freeze(size_t node) { ++nodes_[node].frozen; }
  void thaw(size_t node);
  SimProvider* provider(size_t node) const { return nodes_[node].provider; }
  void set_provider(size_t node, SimProvider* provider);
  uint64_t new_incarnation() { return ++incarnations_; }
  // True once after something was put in a worker's inbox, or a task of at() ran.
  bool has_news() { return std::exchange(news_, false); }
  void set_news() { news_ = true; }

  // --- links ---
  SimLinkState& link(size_t a, size_t b, size_t rail);
  SimWire& wire(size_t from, size_t to, size_t rail);
  // Called before each acknowledgement leaves.
  using BeforeAck = SimFabric::BeforeAck;
  void set_before_ack(BeforeAck call) { before_ack_ = std::move(call); }
  void before_ack(size_t from, size_t to, size_t rail) {
    if (before_ack_) before_ack_(acks_++, from, to, rail);
  }

  // --- queue pairs, by number; null when it is gone ---
  uint32_t add(QueuePair* queue_pair);
  void remove(uint32_t id) { queue_pairs_[id] = nullptr; }
  QueuePair* find(uint32_t id) const {
    return id < queue_pairs_.size() ? queue_pairs_[id] : nullptr;
  }

  // --- chance ---
  bool chance(double probability);  // draws nothing where the answer is certain
  Time uniform(Time limit);         // in [0, limit]

  void violation(std::string what);
  const std::vector<std::string>& violations() const { return violations_; }
  uint64_t digest() const { return digest_; }

 private:
  struct VirtualClock final : Clock {
    Time now() const override { return time; }
    Time time{};
  };
  struct Node {
    bool alive = true;
    int frozen = 0;  // freezes under way
    SimProvider* provider = nullptr;
  };
  struct Event {
    enum class Kind : uint8_t { kTask, kTransmitted, kArrival, kTimer };
    Time at{};
    uint64_t order = 0;
    Kind kind = Kind::kTask;
    bool news = false;  // of a task
    uint32_t id = 0;    // of the task or queue pair
    SimWire* wire = nullptr;
    SimPacket packet;
    // Sorts a max-heap so that the earliest is on top.
    bool operator<(const Event& other) const {
      return std::tie(at, order) > std::tie(other.at, other.order);
    }
  };
  void push(Event event);
  void push_task(Time when, std::function<void()> task, bool news);
  void run(const Event& event);
  uint64_t random();

  const SimOptions options_;
  VirtualClock clock_;
  SimStats stats_;
  std::vector<Event> events_;
  uint64_t order_ = 0;
  std::vector<std::function<void()>> tasks_;
  std::vector<uint32_t> free_tasks_;
  std::vector<Node> nodes_;
  std::map<std::tuple<size_t, size_t, size_t>, std::unique_ptr<SimLinkState>> links_;
  std::vector<QueuePair*> queue_pairs_{nullptr};  // number 0 names none
  uint64_t random_state_;
  uint64_t incarnations_ = 0;
  BeforeAck before_ack_;
  uint64_t acks_ = 0;
  bool news_ = false;
  std::vector<std::string> violations_;
  uint64_t digest_ = 0xcbf29ce484222325;
};

}  // namespace baton::sim
