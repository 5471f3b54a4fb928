// A simulated fabric: an RDMA network in one process, in virtual time, as good or as bad as a test
// wants it.
//
//   SimFabric fabric({.seed = 7, .nodes = 2, .rails = 2, .link = {.loss = 0.01}});
//   auto a = Worker::create({.clock = &fabric.clock(),
//                            .extra_providers = {fabric.provider_factory(0)}});
//   fabric.attach(**a);                                   // likewise b on node 1
//   fabric.flap(0, 1, /*rail=*/0, 5ms, 40ms);
//   bool done = fabric.run_until([&] { return ended(*(*a)->state(id)); }, 1s);
//
// Workers, their providers and the fabric live in one thread. Nothing happens between calls; time
// only moves inside run_until() and run_for(). Everything that happens follows from the seed and
// the calls made.
//
// The model: each pair of nodes is joined by `rails` full-duplex links. A connection has one
// reliable queue pair per link (queue_pair.h), which cuts messages into packets of `mtu` bytes.
// Packets queue for the link, round-robin between queue pairs, and arrive `latency` after their
// last byte has left; headers, acknowledgements and read requests take latency but no bandwidth. A
// transfer of B bytes over an idle link therefore ends B / bandwidth + 2 * latency after it was
// submitted (a read: the request goes one way, the bytes come the other). A packet's bytes are
// copied when it arrives. Packets may be lost, repeated and overtaken; the queue pair repairs that
// as hardware does, by acknowledgement, timeout and retry, until `retry_count` runs out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "transport/clock.h"
#include "transport/provider.h"

namespace baton {
class Worker;
}

namespace baton::sim {

class SimNetwork;

// One link between two nodes; both directions are alike.
struct SimLink {
  double bytes_per_second = 12.5e9;  // 0: unlimited
  Time latency = std::chrono::microseconds(1);
  double loss = 0;       // probability that a packet or an acknowledgement is lost
  double duplicate = 0;  // probability that it arrives twice
  double reorder = 0;    // probability that it is held up by up to reorder_delay
  Time reorder_delay = std::chrono::microseconds(20);
};

struct SimOptions {
  uint64_t seed = 1;
  size_t nodes = 2;
  size_t rails = 1;  // links per pair of nodes
  SimLink link;      // of every link, unless set_link() says otherwise
  size_t mtu = 4096;

  // The adapter. Whoever exceeds these has written a bug: it is refused and put in violations().
  uint32_t queue_depth = 16;  // work requests a queue pair holds
  size_t max_message = size_t{1} << 30;
  // What a rail asks of the worker.
  size_t slice_bytes = 256 << 10;
  uint32_t rail_depth = 32;  // slices, those in the queue pair among them

  Time ack_timeout = std::chrono::microseconds(500);
  uint32_t retry_count = 7;
  Time redial_interval = std::chrono::milliseconds(2);  // while a lost rail is being brought back
};

struct SimStats {
  uint64_t packets = 0;  // that left a node, acknowledgements among them
  uint64_t lost = 0;     // by chance, on a link that is down, or to a dead node
  uint64_t duplicated = 0;
  uint64_t reordered = 0;
  uint64_t timeouts = 0;  // after which a queue pair sent again
  uint64_t rails_lost = 0;
  uint64_t rails_made = 0;
  uint64_t recoveries = 0;  // of a queue pair after a remote access error
};

class SimFabric {
 public:
  explicit SimFabric(SimOptions options);
  ~SimFabric();  // after all workers that use it
  SimFabric(const SimFabric&) = delete;
  SimFabric& operator=(const SimFabric&) = delete;

  const Clock& clock() const;
  // For WorkerOptions::extra_providers. One worker at a time per node; a new worker on a node that
  // was killed revives it.
  ProviderFactory provider_factory(size_t node);

  // Workers to be driven. Detach before destroying one.
  void attach(Worker& worker, size_t node);
  void detach(Worker& worker);

  const SimLink& link(size_t a, size_t b, size_t rail) const;
  // Changes a link, from now on.
  void set_link(size_t a, size_t b, size_t rail, const SimLink& link);
  // The link drops everything in [down_at, up_at).
  void flap(size_t a, size_t b, size_t rail, Time down_at, Time up_at);
  // The node falls silent: its worker is no longer driven, its packets vanish.
  void kill(size_t node, Time at);
  bool alive(size_t node) const;
  // The node's program stands still in [at, until): its worker is not driven, it neither calls nor
  // answers calls. Its adapter goes on: it acknowledges, and what comes is seen afterwards.
  void freeze(size_t node, Time at, Time until);
  bool frozen(size_t node) const;
  // Calls back before each acknowledgement leaves, with its number, counted from 0 from now on, and
  // between which nodes over which link it goes.
  using BeforeAck = std::function<void(uint64_t number, size_t from, size_t to, size_t rail)>;
  void before_each_ack(BeforeAck call);
  // The link drops everything from this moment on until then, what is on its way too.
  void cut(size_t a, size_t b, size_t rail, Time until);
  // Runs `task` at that time, between two steps of the workers.
  void at(Time when, std::function<void()> task);

  // Drives all workers until ready() or until `timeout` has passed in virtual time; returns
  // ready(). When no worker has anything to do, time jumps to the next event or timer.
  bool run_until(const std::function<bool()>& ready, Time timeout);
  void run_for(Time span);

  // What the code under test did that an adapter would refuse. Tests assert that it is empty.
  const std::vector<std::string>& violations() const;
  const SimStats& stats() const;
  // A hash over everything that happened: equal for equal seeds and calls.
  uint64_t digest() const;
  SimNetwork& network() { return *network_; }

 private:
  struct Driven {
    Worker* worker;
    size_t node;
  };
  bool drive();
  bool awake(size_t node) const { return alive(node) && !frozen(node); }
  Time next_timer() const;

  std::unique_ptr<SimNetwork> network_;
  std::vector<Driven> workers_;
};

}  // namespace baton::sim
