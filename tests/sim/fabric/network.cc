// The event queue of the simulation and the tables of what is simulated.
#include "tests/sim/fabric/network.h"

#include <algorithm>

#include "tests/sim/fabric/provider.h"
#include "tests/sim/fabric/queue_pair.h"
#include "transport/base/splitmix.h"

namespace baton::sim {
namespace {
constexpr size_t kMaxViolations = 1000;
}

SimNetwork::SimNetwork(const SimOptions& options)
    : options_(options), nodes_(options.nodes), random_state_(options.seed) {}

SimNetwork::~SimNetwork() = default;

void SimNetwork::push(Event event) {
  event.at = std::max(event.at, now());
  event.order = order_++;
  events_.push_back(event);
  std::push_heap(events_.begin(), events_.end());
}

void SimNetwork::push_task(Time when, std::function<void()> task, bool news) {
  if (free_tasks_.empty()) {
    free_tasks_.push_back(static_cast<uint32_t>(tasks_.size()));
    tasks_.emplace_back();
  }
  const uint32_t id = free_tasks_.back();
  free_tasks_.pop_back();
  tasks_[id] = std::move(task);
  push({.at = when, .kind = Event::Kind::kTask, .news = news, .id = id});
}

void SimNetwork::at_transmitted(Time when, SimWire& wire, const SimPacket& packet) {
  push({.at = when, .kind = Event::Kind::kTransmitted, .wire = &wire, .packet = packet});
}

void SimNetwork::at_arrival(Time when, const SimPacket& packet) {
  push({.at = when, .kind = Event::Kind::kArrival, .packet = packet});
}

void SimNetwork::at_timer(Time when, uint32_t queue_pair) {
  push({.at = when, .kind = Event::Kind::kTimer, .id = queue_pair});
}

void SimNetwork::advance_to(Time time) {
  clock_.time = std::max(clock_.time, time);
  while (!events_.empty() && events_.front().at <= clock_.time) {
    const Event event = events_.front();
    std::pop_heap(events_.begin(), events_.end());
    events_.pop_back();
    run(event);
  }
}

void SimNetwork::run(const Event& event) {
  for (uint64_t word : {static_cast<uint64_t>(event.at.count()), static_cast<uint64_t>(event.kind),
                        uint64_t{event.id}, uint64_t{event.packet.to}, event.packet.message,
                        uint64_t{event.packet.index}}) {
    digest_ = (digest_ ^ word) * 0x100000001b3;
  }
  switch (event.kind) {
    case Event::Kind::kTask: {
      const std::function<void()> task = std::move(tasks_[event.id]);
      free_tasks_.push_back(event.id);
      task();
      news_ |= event.news;
      break;
    }
    case Event::Kind::kTransmitted:
      event.wire->transmitted(event.packet);
      break;
    case Event::Kind::kArrival: {
      QueuePair* target = find(event.packet.to);
      if (target != nullptr && target->reachable()) {
        target->receive(event.packet);
      } else {
        ++stats_.lost;
      }
      break;
    }
    case Event::Kind::kTimer:
      if (QueuePair* queue_pair = find(event.id)) queue_pair->on_timer();
      break;
  }
}

void SimNetwork::set_provider(size_t node, SimProvider* provider) {
  nodes_[node].provider = provider;
  if (provider != nullptr) nodes_[node].alive = true;
}

void SimNetwork::thaw(size_t node) {
  if (--nodes_[node].frozen > 0 || nodes_[node].provider == nullptr) return;
  nodes_[node].provider->thaw();
  set_news();
}

SimLinkState& SimNetwork::link(size_t a, size_t b, size_t rail) {
  auto& slot = links_[{std::min(a, b), std::max(a, b), rail}];
  if (slot == nullptr) slot = std::make_unique<SimLinkState>(*this, options_.link);
  return *slot;
}

SimWire& SimNetwork::wire(size_t from, size_t to, size_t rail) {
  return link(from, to, rail).wires[from < to ? 0 : 1];
}

uint32_t SimNetwork::add(QueuePair* queue_pair) {
  queue_pairs_.push_back(queue_pair);
  return static_cast<uint32_t>(queue_pairs_.size() - 1);
}

uint64_t SimNetwork::random() { return base::splitmix_next(random_state_); }

bool SimNetwork::chance(double probability) {
  if (probability <= 0) return false;
  return static_cast<double>(random() >> 11) * 0x1p-53 < probability;
}

Time SimNetwork::uniform(Time limit) {
  return Time(static_cast<int64_t>(random() % (static_cast<uint64_t>(limit.count()) + 1)));
}

void SimNetwork::violation(std::string what) {
  if (violations_.size() < kMaxViolations) violations_.push_back(std::move(what));
}

}  // namespace baton::sim
