// A KV store: a process that keeps KV blocks in its memory for several engines.
//
//   auto store = KvStore::start({.worker = {.name = "kv-store", .listen_port = 7600},
//                                .memory_bytes = 8ull << 30});
//   store->address(), store->port() ...            // what engines are told
//
// Engines ask which records are there (one message), and read them from the store's memory
// one-sided; a record that was found stays for its lease. What an engine offers, the store reads
// from the engine's memory, checks and keeps, in place of what was used longest ago. No client
// writes into the store's memory but the store. Who may speak to it is what the cluster's key says.
//
// A store has no opinion about models: names are fingerprints (tiers/tier_key.h). It forgets
// everything when it ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kvtransfer/store/block_arena.h"
#include "transport/clock.h"
#include "transport/worker.h"

namespace baton::kvtransfer::store {

struct KvStoreOptions {
  WorkerOptions worker;
  size_t memory_bytes = size_t{1} << 30;
  Time longest_lease = std::chrono::seconds(60);  // whatever is asked for
};

struct KvStoreStats {
  ArenaStats arena;
  uint64_t lookups = 0;
  uint64_t asked = 0;     // records in them
  uint64_t found = 0;     // of these
  uint64_t taken = 0;     // records that were read from engines
  uint64_t broken = 0;    // offers whose bytes were not the record
  uint64_t rejected = 0;  // messages that were none
};

class KvStore {
 public:
  // Takes and registers the memory. What a worker cannot do is said as Worker::create() says it.
  static absl::StatusOr<std::unique_ptr<KvStore>> start(KvStoreOptions options);
  virtual ~KvStore() = default;

  virtual const std::string& address() const = 0;
  virtual uint16_t port() const = 0;
  // The blocks, for others that serve them (lm_server.h). Lives as long as the store.
  virtual BlockArena& arena() = 0;
  virtual KvStoreStats stats() const = 0;
};

}  // namespace baton::kvtransfer::store
