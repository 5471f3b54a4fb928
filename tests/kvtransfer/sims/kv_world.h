// A prefill and a decode worker on a simulated fabric, in virtual time.
#pragma once

#include "kvtransfer/baton_connector.h"
#include "tests/kvtransfer/kv_engines.h"
#include "tests/sim/fabric/fabric.h"
#include "tests/test.h"

namespace baton::kvtransfer {

inline constexpr size_t kPrefillNode = 0;
inline constexpr size_t kDecodeNode = 1;

struct SimNode {
  Worker* worker = nullptr;
  std::unique_ptr<KvConnector> connector;
};

inline BatonConnectorOptions on_fabric(sim::SimFabric& fabric, size_t node, const char* name) {
  BatonConnectorOptions options;
  options.worker.name = name;
  options.worker.key = *ClusterKey::from_bytes("a key for this test only");
  options.worker.clock = &fabric.clock();
  options.worker.settings = {{"peer.redial_ms", "5000"}};
  options.worker.extra_providers = {fabric.provider_factory(node)};
  options.worker.require = "sim";
  return options;
}

inline std::unique_ptr<Worker> worker_on(sim::SimFabric& fabric, size_t node,
                                         const BatonConnectorOptions& options) {
  absl::StatusOr<std::unique_ptr<Worker>> worker = Worker::create(options.worker);
  if (!worker.ok()) {
    ADD_FAILURE() << worker.status();
    std::abort();
  }
  fabric.attach(**worker, node);
  return *std::move(worker);
}

// A fabric with a prefill and a decode worker on it.
class World {
 public:
  World(const sim::SimOptions& sim, uint32_t seed, KvSendMode mode, const KvLayout& prefill_layout,
        const KvLayout& decode_layout)
      : fabric_(sim),
        prefill_node_(make(kPrefillNode, "prefill-0", mode)),
        decode_node_(make(kDecodeNode, "decode-0", mode)),
        prefill(*prefill_node_.connector, prefill_layout, seed),
        decode(*decode_node_.connector, decode_layout, seed + 1) {}
  ~World() {
    for (SimNode* node : {&prefill_node_, &decode_node_}) fabric_.detach(*node->worker);
  }

  std::string prefill_address() const { return prefill_node_.connector->address(); }
  Time now() const { return fabric_.clock().now(); }
  sim::SimFabric& fabric() { return fabric_; }
  KvConnectorStats prefill_stats() const { return prefill_node_.connector->stats(); }
  KvConnectorStats decode_stats() const { return decode_node_.connector->stats(); }

  // Its process is stopped: its adapter goes on, as a kernel does for it.
  void stop(size_t node, bool stopped) { stopped_[node] = stopped; }

  // Runs both engines, 50 us of virtual time a step.
  bool run(const std::function<bool()>& ready, Time limit) {
    for (const Time end = now() + limit; now() < end;) {
      if (!stopped_[kPrefillNode]) prefill.step();
      if (!stopped_[kDecodeNode]) decode.step();
      if (ready()) return true;
      fabric_.run_for(std::chrono::microseconds(50));
    }
    return false;
  }

 private:
  SimNode make(size_t node, const char* name, KvSendMode mode) {
    BatonConnectorOptions options = on_fabric(fabric_, node, name);
    options.mode = mode;
    std::unique_ptr<Worker> worker = worker_on(fabric_, node, options);
    SimNode made;
    made.worker = worker.get();
    made.connector = make_baton_connector(std::move(worker), options);
    return made;
  }

  sim::SimFabric fabric_;
  SimNode prefill_node_;
  SimNode decode_node_;
  bool stopped_[2] = {};

 public:
  TestPrefill prefill;
  TestDecode decode;
};

}  // namespace baton::kvtransfer
