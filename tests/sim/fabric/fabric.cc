// The simulated fabric: runs the workers of all nodes in virtual time, event by event.
#include "tests/sim/fabric/fabric.h"

#include <algorithm>

#include "absl/strings/str_format.h"
#include "tests/sim/fabric/network.h"
#include "tests/sim/fabric/provider.h"
#include "transport/base/durations.h"
#include "transport/worker.h"

namespace baton::sim {
namespace {
// Rounds in which workers claim to be busy while no time passes, before we call it spinning.
constexpr int kMaxIdleRounds = 1 << 20;
}  // namespace

SimFabric::SimFabric(SimOptions options) : network_(std::make_unique<SimNetwork>(options)) {}
SimFabric::~SimFabric() = default;

const Clock& SimFabric::clock() const { return network_->clock(); }

ProviderFactory SimFabric::provider_factory(size_t node) {
  return [this, node](const ProviderContext& context) {
    return std::make_unique<SimProvider>(*network_, node, context);
  };
}

void SimFabric::attach(Worker& worker, size_t node) { workers_.push_back({&worker, node}); }

void SimFabric::detach(Worker& worker) {
  workers_.erase(std::remove_if(workers_.begin(), workers_.end(),
                                [&](const Driven& driven) { return driven.worker == &worker; }),
                 workers_.end());
}

const SimLink& SimFabric::link(size_t a, size_t b, size_t rail) const {
  return network_->link(a, b, rail).spec;
}

void SimFabric::set_link(size_t a, size_t b, size_t rail, const SimLink& link) {
  network_->link(a, b, rail).spec = link;
}

void SimFabric::flap(size_t a, size_t b, size_t rail, Time down_at, Time up_at) {
  SimLinkState& link = network_->link(a, b, rail);
  network_->at(down_at, [&link] { ++link.faults; });
  network_->at(up_at, [&link] { --link.faults; });
}

void SimFabric::kill(size_t node, Time at) {
  network_->at(at, [this, node] { network_->kill(node); });
}

bool SimFabric::alive(size_t node) const { return network_->alive(node); }

void SimFabric::freeze(size_t node, Time at, Time until) {
  network_->at(at, [this, node] { network_->freeze(node); });
  network_->at(until, [this, node] { network_->thaw(node); });
}

bool SimFabric::frozen(size_t node) const { return network_->frozen(node); }

void SimFabric::before_each_ack(BeforeAck call) { network_->set_before_ack(std::move(call)); }

void SimFabric::cut(size_t a, size_t b, size_t rail, Time until) {
  SimLinkState& link = network_->link(a, b, rail);
  ++link.faults;
  network_->at(until, [&link] { --link.faults; });
}

void SimFabric::at(Time when, std::function<void()> task) { network_->at(when, std::move(task)); }

bool SimFabric::drive() {
  bool any = false;
  for (size_t i = 0; i < workers_.size(); ++i) {
    const Driven driven = workers_[i];
    if (awake(driven.node)) any |= driven.worker->progress();
  }
  return any;
}

Time SimFabric::next_timer() const {
  Time next = kNever;
  for (const Driven& driven : workers_) {
    if (awake(driven.node)) next = std::min(next, driven.worker->next_timer());
  }
  return next;
}

bool SimFabric::run_until(const std::function<bool()>& ready, Time timeout) {
  const Time start = network_->now();
  const Time end = base::deadline_after(start, timeout);
  int rounds = 0;
  while (true) {
    // ready() may submit, so the workers come after it.
    if (ready()) return true;
    if (drive()) {
      if (++rounds == kMaxIdleRounds) {
        network_->violation(absl::StrFormat(
            "a worker's progress() claimed to be busy %u times while no time passed", rounds));
        return false;
      }
      continue;
    }
    rounds = 0;
    Time timer = next_timer();
    if (timer <= network_->now()) {
      network_->violation("a worker's next_timer() lies in the past though nothing was due");
      timer = kNever;
    }
    // Events without news for a worker need no round of their own.
    do {
      const Time next = std::min(network_->next_event(), timer);
      if (next > end || next == kNever) {
        if (end != kNever) network_->advance_to(end);
        return ready();
      }
      network_->advance_to(next);
    } while (network_->now() != timer && !network_->has_news());
  }
}

void SimFabric::run_for(Time span) {
  run_until([] { return false; }, span);
}

const std::vector<std::string>& SimFabric::violations() const { return network_->violations(); }
const SimStats& SimFabric::stats() const { return network_->stats(); }
uint64_t SimFabric::digest() const { return network_->digest(); }

}  // namespace baton::sim
