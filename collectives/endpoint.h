// The endpoint: what all communicators of a process share.
//
//   auto endpoint = Endpoint::open({.worker = {.listen_host = "*"}});
//   std::string mine = (*endpoint)->handle().bytes();       // 96 bytes: give them to the others
//   std::vector<Handle> all = ...;                          // of all ranks, in rank order
//   auto comm = Communicator::create(*endpoint, all, {.uuid = 7});   // returns at once
//   absl::Status ready = (*comm)->wait_ready(std::chrono::seconds(30));
//
// An endpoint has one worker, one memory pool, one connection to each process that it talks to, and
// at most one thread. Communicators are cheap beside it: one more among the same processes makes no
// connection, no socket and no thread.
//
// Threads: every function may be called from any thread. All communicators of one endpoint share
// one lock; a thread that waits for a call of one of them advances the calls of all.
//
// Life: communicators hold the endpoint. It closes its connections when the last of them and the
// last shared_ptr to it are gone, and says goodbye before, so that no peer takes that for a death.
// Groups share a connection. Where one ends by abort(), a deadline or its destructor, and the wire
// does not let go of what it has sent, the connection is made anew: calls of other groups go on
// over it and notice a pause at most. Only a window's access to memory of a device that does not
// end ends the connection for all groups of the two processes, with Unavailable. In a forked child
// it does nothing, and every function of it fails: a child opens one of its own.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/clock.h"
#include "transport/worker.h"

namespace baton {

namespace collectives::internal {
class EndpointImpl;
}

// Names the process of an endpoint and its address: 96 bytes, which the application passes to the
// other ranks by its own means. A plain value without secrets: a caller proves with the cluster's
// key that it may connect.
class Handle {
 public:
  static constexpr size_t kBytes = 96;

  // InvalidArgument: not a handle (length, checksum); FailedPrecondition: of another version of the
  // collectives, which the text names.
  static absl::StatusOr<Handle> decode(std::string_view bytes);
  // The binary form, which decode() reads.
  std::string bytes() const { return {bytes_.data(), bytes_.size()}; }
  // For people: "node7, pid 4711".
  std::string label() const;

  // The handle of any worker, for programs that use workers directly.
  static Handle of(const Worker& worker);
  // The address for Worker::connect() from this process. "" if there is no way: both sides need
  // tcp, or shm on one machine.
  std::string address() const;
  WorkerUid uid() const;

  bool operator==(const Handle&) const = default;
  // Any order, equal everywhere: for groups whose members are given as a set.
  bool operator<(const Handle& other) const {
    return std::memcmp(bytes_.data(), other.bytes_.data(), kBytes) < 0;
  }

 private:
  friend class collectives::internal::EndpointImpl;
  std::array<char, kBytes> bytes_{};
};

struct EndpointOptions {
  // Providers, key, shape, timeline, clock: as for any worker. An empty listen_host means loopback:
  // ranks on other machines need "*" or an address.
  WorkerOptions worker;
  size_t slab_bytes = 16 << 20;  // memory is taken from the system in pieces of at least this
  bool background = false;       // a thread advances calls while callers compute
};

// Memory that peers reach directly. A plain value.
struct CommBuffer {
  std::byte* data = nullptr;
  size_t size = 0;
  uint32_t index = 0;  // for free()
};

class Endpoint {
 public:
  // Errors as of Worker::create().
  static absl::StatusOr<std::shared_ptr<Endpoint>> open(EndpointOptions options);
  ~Endpoint();
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  // Others make communicators from this handle. It does not change after open().
  const Handle& handle() const;

  // Memory for calls of every communicator of this endpoint: over shm peers read it in place, over
  // RDMA it is registered. Aligned to 64 bytes at least; zeroed. Stays until free() or the end of
  // the endpoint. ResourceExhausted: the machine has too little.
  absl::StatusOr<CommBuffer> allocate(size_t bytes);
  void free(const CommBuffer& buffer);

  // Advances every communicator by a bounded amount and runs the callbacks of calls that have
  // ended; true if anything happened. For callers with a loop of their own, who may sleep on
  // event_fd() once it has returned false, some milliseconds at most: deadlines pass without an
  // event. The descriptor is readable when there is something to do, until the next progress().
  bool progress();
  int event_fd() const;

  Worker& worker();

 private:
  friend class Communicator;
  explicit Endpoint(std::unique_ptr<collectives::internal::EndpointImpl> impl);
  std::unique_ptr<collectives::internal::EndpointImpl> impl_;
};

}  // namespace baton
