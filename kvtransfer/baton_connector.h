// The KvConnector over a session (kvtransfer/kv_session.h) and an agent of its own: a registered
// cache, the loads it asked for (decode) and the jobs it was asked for (prefill). One object can
// play both sides.
//
//   BatonConnectorOptions options;
//   options.worker.name = "prefill-0";
//   auto connector = make_baton_connector(options);
//   auto cache = (*connector)->allocate_cache(layout);
//
// Threads: as KvConnector says, one engine thread calls everything. Threads of the connector's move
// the bytes meanwhile, renew leases and answer other workers. Both ends register their cache for
// reads and writes of workers that have the cluster's key.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "kvtransfer/kv_connector.h"
#include "transport/worker.h"

namespace baton::kvtransfer {

enum class KvSendMode {
  kLayerwise,   // a layer's blocks leave as soon as save_layer() has them
  kSerialized,  // nothing leaves before finish_job(): what most systems do, for comparison
};

struct BatonConnectorOptions {
  // Name, listener, cluster key, providers and what is required of them, link shape, settings. Its
  // timeline, if any, also gets a span per write on track "transfer" (from submission to the end of
  // the transfer) and an instant per layer on track "arrival", with the request's id and bytes.
  WorkerOptions worker;
  KvSendMode mode = KvSendMode::kLayerwise;
  // Prefill: loads may pull (KvLoad::pull). False: such loads are refused.
  bool allow_pull = false;
  // Prefill: the longest lease that it grants them, and so the longest that blocks are held for a
  // decode worker that died.
  Time max_lease = patient(std::chrono::seconds(60));
  bool huge_pages = true;  // for the cache, where the machine has some
};

// Errors: what Worker::create() says.
absl::StatusOr<std::unique_ptr<KvConnector>> make_baton_connector(
    const BatonConnectorOptions& options);

// Over a worker that is there already, made with `options.worker`: for whoever must drive it too,
// as a simulated fabric does. The connector takes every notification and peer event of it, and
// bytes move in its calls only.
std::unique_ptr<KvConnector> make_baton_connector(std::unique_ptr<Worker> worker,
                                                  const BatonConnectorOptions& options);

// What the worker of a connector says of itself; zeros of one that was not made here. Any thread.
WorkerStats worker_stats(const KvConnector& connector);

}  // namespace baton::kvtransfer
