// LMCache's remote connector, `lm://host:port`, answered from a store's memory.
//
//   auto server = LmServer::start({.port = 65432}, store->arena());
//
// The wire has no authentication and no encryption: whoever reaches the port reads and writes all
// values. It listens on loopback unless told otherwise. What it has in common with Baton's own
// records is the memory; names of one are never names of the other.
//
// One thread serves all connections. A stranger costs a descriptor for at most 20 seconds; one who
// sends or takes a value slower than a MiB a second (and 20 seconds) is closed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kvtransfer/store/block_arena.h"
#include "kvtransfer/store/lm_session.h"

namespace baton::kvtransfer::store {

struct LmServerOptions {
  std::string host = "127.0.0.1";  // as WorkerOptions::listen_host
  uint16_t port = 0;               // 0: any
  size_t connections = 1024;       // at most; then one that has never spoken goes for a newcomer
};

struct LmServerStats {
  LmTotals totals;
  size_t connections = 0;
  uint64_t turned_away = 0;
  uint64_t too_slow = 0;
};

class LmServer {
 public:
  // The arena must outlive the server. What the system says where the port cannot be had.
  static absl::StatusOr<std::unique_ptr<LmServer>> start(const LmServerOptions& options,
                                                         BlockArena& arena);
  virtual ~LmServer() = default;
  virtual uint16_t port() const = 0;
  virtual LmServerStats stats() const = 0;
};

}  // namespace baton::kvtransfer::store
