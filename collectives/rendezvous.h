// The rendezvous: how ranks that know only "host:port" come to know each other.
//
// A server (rank 0's own, or a launcher's that outlives ranks) waits until every rank of a
// generation has sent its info, then sends all rank_infos to all. It speaks TCP; each connection is
// authenticated by the transport's Handshake before anything is parsed. Ranks retry until the
// server is there.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/clock.h"
#include "transport/identity.h"

namespace baton::collectives {

// A rank's introduction to the others. At most 64 KiB encoded.
struct RankInfo {
  uint32_t rank = 0;
  uint32_t ranks = 0;
  uint64_t generation = 0;  // 0 at first; higher for a group that replaces a broken one
  uint32_t version = 0;     // of the collectives protocol
  uint32_t pid = 0;
  std::string host;            // for people
  std::string worker_address;  // encoded Address of its worker
  std::string payload;         // whatever the communicator adds (regions, settings)

  std::string encode() const;
  static absl::StatusOr<RankInfo> decode(std::string_view bytes);
};

inline constexpr uint32_t kCollectivesVersion = 8;

// Serves any number of generations, one after the other, on a thread of its own, until destroyed.
class RendezvousServer {
 public:
  // `host`: "" for loopback only, "*" for every interface. Port 0: any free one. Ranks 0: as many
  // as the first rank to come expects.
  static absl::StatusOr<std::unique_ptr<RendezvousServer>> start(const ClusterKey& key,
                                                                 const std::string& host,
                                                                 uint16_t port, uint32_t ranks);
  // Listens so that all ranks reach it at `rendezvous` ("host:port", or several of one port with
  // commas between): on loopback alone if that is a loopback address, else on every interface.
  // AlreadyExists: another process has the port.
  static absl::StatusOr<std::unique_ptr<RendezvousServer>> start_at(const ClusterKey& key,
                                                                    const std::string& rendezvous,
                                                                    uint32_t ranks);
  // Closes all connections at once, but for answers that are on their way.
  ~RendezvousServer();
  // "127.0.0.1:4711"; on every interface: the addresses of those that lead out, with commas
  // between.
  std::string address() const;

 private:
  struct Impl;
  explicit RendezvousServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// True if only ranks of this machine can reach `rendezvous` ("host:port[,host:port]"): all its
// addresses are loopback, as numbers or as "localhost". Other names do not count: a host often
// resolves its own name to loopback.
bool only_this_machine(const std::string& rendezvous);

// The address that the workers of such ranks listen on: "" (loopback) if only ranks of this machine
// can come, else "*" (every interface).
std::string listen_host_for(const std::string& rendezvous);

// Hands `info` to the server at `address` and returns the rank_infos of all ranks of its
// generation, ordered by rank. Blocks, retries while no server listens. One rank needs no server:
// with an empty address it meets itself. Errors, at every rank that has come:
//   DeadlineExceeded     not all came in time: names those missing
//   InvalidArgument      a rank came twice, is out of range, or ranks disagree about their number
//   FailedPrecondition   another library version: says both; or a generation that is over
//   Unauthenticated      another cluster key
absl::StatusOr<std::vector<RankInfo>> meet(const std::string& address, const ClusterKey& key,
                                           const RankInfo& info, Time timeout);

}  // namespace baton::collectives
