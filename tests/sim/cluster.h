// Workers on a simulated fabric, each with registered memory, for tests.
#pragma once

#include "tests/sim/fabric/fabric.h"
#include "tests/test.h"
#include "transport/worker.h"

namespace baton::sim {

inline ClusterKey test_key(std::string_view secret = "a secret of the tests") {
  return *ClusterKey::from_bytes(secret);
}

struct SimCluster {
  struct Member {
    std::vector<std::byte> memory;
    std::unique_ptr<Worker> worker;
    MemoryRegion region;
    RemoteRegion remote;
  };

  SimCluster(SimOptions options, size_t bytes, uint32_t max_transfers = 256)
      : fabric(options), members(options.nodes) {
    for (size_t node = 0; node < options.nodes; ++node) start(node, bytes, max_transfers);
  }
  ~SimCluster() {
    for (size_t node = 0; node < members.size(); ++node) stop(node);
  }

  void start(size_t node, size_t bytes, uint32_t max_transfers = 256,
             const ClusterKey& key = test_key()) {
    Member& member = members[node];
    member.worker = must(Worker::create({.name = "node-" + std::to_string(node),
                                         .key = key,
                                         .clock = &fabric.clock(),
                                         .max_transfers = max_transfers,
                                         .settings = {{"peer.redial_ms", "5000"}},
                                         .extra_providers = {fabric.provider_factory(node)}}));
    member.memory.assign(bytes, std::byte{0});
    auto region = must(member.worker->register_memory(member.memory.data(), bytes));
    member.region = region;
    member.remote = *member.worker->remote_region(region);
    fabric.attach(*member.worker, node);
  }
  void stop(size_t node) {
    if (members[node].worker == nullptr) return;
    fabric.detach(*members[node].worker);
    members[node].worker.reset();
  }

  Worker& worker(size_t node) { return *members[node].worker; }

  // Connects and waits until both sides have all rails; returns the ids at both ends.
  std::pair<PeerId, PeerId> connect(size_t from, size_t to) {
    auto peer = must(worker(from).connect(worker(to).address()));
    PeerId other;
    EXPECT_TRUE(fabric.run_until(
        [&] {
          while (auto event = worker(to).next_peer_event()) other = event->peer;
          return other.generation != 0 && worker(from).peer_state(peer) == PeerState::kUp;
        },
        std::chrono::seconds(1)))
        << worker(from).peer_status(peer);
    fabric.run_for(std::chrono::milliseconds(1));
    return {peer, other};
  }

  TransferRequest request(Op op, size_t from, PeerId peer, size_t to, size_t bytes) {
    return {.op = op,
            .peer = peer,
            .local = members[from].region,
            .local_layout = Layout::contiguous(0, bytes),
            .remote = members[to].remote,
            .remote_layout = Layout::contiguous(0, bytes)};
  }
  bool run_to_end(size_t node, TransferId id, Time timeout = std::chrono::seconds(10)) {
    return fabric.run_until([&] { return ended(*worker(node).state(id)); }, timeout);
  }

  SimFabric fabric;
  std::vector<Member> members;
};

}  // namespace baton::sim
