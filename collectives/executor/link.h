// A link: messages between this rank and one other, in order within each lane.
//
// What the executor needs of a way to reach a rank, and no more. Two kinds exist: DirectLink, where
// each side reads the other's memory in place, and TransferLink, over any provider's transfers.
// All calls come from one thread at a time.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "collectives/executor/call.h"
#include "collectives/executor/segments.h"

namespace baton::collectives::executor {

// The call that a message belongs to.
struct CallTag {
  const CallDescriptor* call = nullptr;
  uint32_t fingerprint = 0;
};

class Link {
 public:
  virtual ~Link() = default;

  // Sends the next message of `lane`. Returns its number (from 1), or 0 if there is no room: ask
  // again. The source must stay as it is until delivered().
  virtual uint64_t send(uint32_t lane, const Segments& source, const CallTag& tag) = 0;
  // Whether the source of that message may be written again; on the point-to-point lane: whether
  // the receiver has taken it, which it does only in a call of the same count and type.
  virtual bool delivered(uint32_t lane, uint64_t number) = 0;

  // The next message of `lane`, if it is here: where it lies, valid until consume(). `expected` is
  // how long the caller thinks it is. A message of another call is an error: sets `error`.
  virtual bool peek(uint32_t lane, size_t expected, const CallTag& tag, Segments& message,
                    absl::Status& error) = 0;
  // The caller has read that message. False: it has not been consumed, and what was read means
  // nothing; peek() again.
  [[nodiscard]] virtual bool consume(uint32_t lane) = 0;

  // The other side may be asleep: make sure that it looks. After a batch of the above.
  virtual void flush() {}

  // Whether the peer reads what is sent where it lies: its lines are then in the peer's caches.
  virtual bool peer_reads_in_place() const { return false; }

  // OK, or why messages can no longer be sent.
  virtual absl::Status status() const { return absl::OkStatus(); }

  // For people: "shm, direct", "tcp 10.0.0.2:4000 (cubic, 4 sockets)".
  virtual std::string route() const = 0;
};

}  // namespace baton::collectives::executor
