// Endpoints on a simulated fabric, one on each of its nodes, in one thread and in virtual time; and
// split() without blocking.
#pragma once

#include "collectives/internal/communicator_impl.h"
#include "tests/communicator/group.h"
#include "tests/sim/fabric/fabric.h"
#include "tests/test.h"

namespace baton {

// split() in its two steps.
class SteppedSplit {
 public:
  SteppedSplit(Communicator& comm, int color, int key)
      : comm_(comm), work(comm.impl_->begin_split(color, key, split_)) {}
  absl::StatusOr<std::unique_ptr<Communicator>> finish(GroupOptions options) {
    return comm_.impl_->finish_split(split_, std::move(options));
  }

 private:
  Communicator& comm_;
  Communicator::Impl::Splitting split_;

 public:
  const absl::StatusOr<Work> work;
};

class SimNodes {
 public:
  explicit SimNodes(const sim::SimOptions& options, uint32_t max_transfers = 1024)
      : nodes_(options.nodes), fabric_(options), clock_(fabric_.clock()) {
    std::vector<std::pair<Handle, size_t>> opened;
    std::vector<std::shared_ptr<Endpoint>> endpoints;
    for (size_t place = 0; place < nodes_; ++place) {
      EndpointOptions own;
      own.worker.require = "sim";
      own.worker.key = test_key();
      own.worker.clock = &clock_;
      own.worker.extra_providers = {fabric_.provider_factory(place)};
      own.worker.max_transfers = max_transfers;
      own.slab_bytes = 2 << 20;
      auto endpoint = must(Endpoint::open(own));
      opened.emplace_back(endpoint->handle(), place);
      endpoints.push_back(std::move(endpoint));
    }
    // The one with the lower handle calls the other: in this order, all follows from the
    // seed.
    std::sort(opened.begin(), opened.end());
    for (const auto& [handle, place] : opened) {
      handles_.push_back(handle);
      places_.push_back(place);
      endpoints_.push_back(endpoints[place]);
      fabric_.attach(endpoints_.back()->worker(), place);
    }
  }
  ~SimNodes() {
    clock_.hurry();
    for (const auto& endpoint : endpoints_) fabric_.detach(endpoint->worker());
  }

 protected:
  Time now() const { return fabric_.clock().now(); }
  bool alive(size_t node) const { return fabric_.alive(places_[node]); }
  bool frozen(size_t node) const { return fabric_.frozen(places_[node]); }
  void progress_all() {
    for (size_t node = 0; node < nodes_; ++node) {
      if (alive(node) && !frozen(node)) endpoints_[node]->progress();
    }
  }
  // Until `ready()`, which is asked after each round; false: not within `timeout`. The clock is
  // looked at every 10 ms, as whoever waits does: calls end at their deadlines though nothing is on
  // its way.
  bool drive(const std::function<bool()>& ready, Time timeout) {
    look_until_ = now() + timeout;
    look_at_clock();
    const bool over = fabric_.run_until(
        [&] {
          progress_all();
          return ready();
        },
        timeout);
    look_until_ = now();
    return over;
  }
  void drive_for(Time span) {
    const Time end = now() + span;
    fabric_.at(end, [] {});
    drive([&] { return now() >= end; }, 2 * span);
  }

 private:
  // The fabric's; at the end, when it stands still, one that hurries, so that no endpoint waits for
  // answers to its goodbye.
  class EndClock final : public Clock {
   public:
    explicit EndClock(const Clock& clock) : clock_(clock) {}
    Time now() const override {
      if (hurries_) ahead_ += std::chrono::milliseconds(30);
      return clock_.now() + ahead_;
    }
    void hurry() { hurries_ = true; }

   private:
    const Clock& clock_;
    bool hurries_ = false;
    mutable Time ahead_{};
  };

  void look_at_clock() {
    if (std::exchange(looking_, true)) return;
    fabric_.at(now() + std::chrono::milliseconds(10), [this] {
      looking_ = false;
      if (now() < look_until_) look_at_clock();
    });
  }

  bool looking_ = false;
  Time look_until_{};

 protected:
  const size_t nodes_;
  sim::SimFabric fabric_;
  EndClock clock_;
  std::vector<size_t> places_;  // on the fabric, by node
  std::vector<std::shared_ptr<Endpoint>> endpoints_;
  std::vector<Handle> handles_;
};

inline GroupOptions sim_group(uint64_t uuid, Time timeout) {
  GroupOptions options;
  options.uuid = uuid;
  options.slot_bytes = 64 << 10;
  options.timeout = timeout;
  options.start_timeout = timeout;
  return options;
}

// And a group of all.
class SimGroup : public SimNodes {
 public:
  explicit SimGroup(const sim::SimOptions& fabric, Time timeout = std::chrono::seconds(60))
      : SimNodes(fabric) {
    const GroupOptions options = sim_group(1, timeout);
    for (const auto& endpoint : endpoints_) {
      comms_.push_back(must(Communicator::create(endpoint, handles_, options)));
    }
  }
  ~SimGroup() {
    comms_.clear();
    drive_for(std::chrono::milliseconds(20));
  }
  void wait_ready() {
    ASSERT_TRUE(drive(
        [&] {
          return std::all_of(comms_.begin(), comms_.end(),
                             [](const auto& comm) { return comm->state() == GroupState::kReady; });
        },
        std::chrono::seconds(10)));
  }

 protected:
  std::vector<std::shared_ptr<Communicator>> comms_;
};

}  // namespace baton
