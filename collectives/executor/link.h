// A link: messages between this rank and one other, in order within each lane, and what sends and
// receives are made of (point_to_point.h).
//
// What the executor needs of a way to reach a rank, and no more. Two kinds exist: DirectLink, where
// each side reads the other's memory in place, and TransferLink, over any provider's transfers.
// All calls come from one thread at a time.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "collectives/executor/call.h"
#include "collectives/executor/geometry.h"

namespace baton::collectives::executor {

// The call that a message belongs to.
struct CallTag {
  const CallDescriptor* call = nullptr;
  uint32_t fingerprint = 0;
  size_t most = 0;  // bytes that the message has at most: the same number at both ends
};

// A message between two ranks about a send and its receive. Plain data.
struct Packet {
  enum class Kind : uint8_t {
    kSend,    // there is a send: all that a receive is matched by
    kGrant,   // its receive is there, and this piece of it may come
    kPiece,   // this piece is there
    kTaken,   // the receive has all of it
    kAsk,     // a TransferLink's own: where are your slots?
    kSlots,   // likewise: there
    kPlaces,  // likewise: messages of collectives may come, each to its place
  };
  enum Data : uint8_t {
    kBehind = 1,  // the bytes are behind the packet
    kShown = 2,   // a Place is behind it: where the bytes can be read
    kAsks = 3,    // they come when they are asked for, by kGrant
  };
  Kind kind = Kind::kSend;
  Data data = kBehind;  // of kSend
  uint8_t type = 0;     // of kSend; of kGrant and kPiece: which of the pieces under way
  uint8_t of_v = 0;     // of kSend: a message of an all_to_all_v
  int32_t tag = 0;      // of kSend
  uint64_t number = 0;  // of the send among all from its sender to its receiver, from 1
  uint64_t count = 0;   // of kSend: elements; of kGrant and kPiece: the piece's first byte
  uint32_t whole = 0;   // of kSend: the all_to_all_v, as CallDescriptor::whole()
  uint32_t length = 0;  // of kGrant and kPiece: bytes of the piece; of kSend: of the longest one
};
static_assert(sizeof(Packet) == 32);

class Link {
 public:
  // A place in memory, as the other side of this kind of link understands it.
  struct Place {
    std::array<std::byte, 64> bytes{};
    uint32_t size = 0;

    absl::Span<const std::byte> span() const { return {bytes.data(), size}; }
    // False: too long.
    bool set(absl::Span<const std::byte> from);
  };

  virtual ~Link() = default;
  // False: it stands in for a link that is made when it is used, and has sent nothing.
  virtual bool made() const { return true; }

  // Sends the next message of `lane`. Returns its number (from 1), or 0 if there is no room: ask
  // again. The source must stay as it is until delivered().
  virtual uint64_t send(uint32_t lane, const Segments& source, const CallTag& tag) = 0;
  // True when the source of that message may be overwritten.
  virtual bool delivered(uint32_t lane, uint64_t number) = 0;

  // The next message of `lane`, if it is here: where it lies, valid until consume(). `expected` is
  // how long the caller thinks it is. A message of another call is an error: sets `error`.
  virtual bool peek(uint32_t lane, size_t expected, const CallTag& tag, Segments& message,
                    absl::Status& error) = 0;
  // True: a message of up to `most` bytes waits at its sender until its receiver calls
  // grant_next(). The receiver must call it once per message, in order, and at most kMessagesAhead
  // messages ahead of its reading.
  virtual bool waits_for_grant(size_t) const { return false; }
  // The message of `lane` that is `ahead` behind the last one that was read (1: the next) may come;
  // those before it may need no grant. It comes straight to `place` if that can be reached, and
  // peek() then returns that place. Of `place.data` null: to memory of the link's.
  virtual void grant_next(uint32_t, uint32_t, const Segments&) {}
  // A message of call `sequence`, or of one before it, lies here unread in this lane, where this
  // rank expects no more of them: its sender has called something else. Over a TransferLink what it
  // has called is known otherwise.
  virtual bool stray(uint32_t, uint64_t) const { return false; }
  // The caller has read that message. False: it has not been consumed, and what was read means
  // nothing; peek() again.
  [[nodiscard]] virtual bool consume(uint32_t lane) = 0;

  // --- sends and receives ------------------------------------------------------------------
  // Packets arrive exactly once and, over a TransferLink, in any order.
  // The most bytes behind one that begins a send.
  virtual size_t most_behind() const = 0;
  // False: there is no room, ask again.
  virtual bool tell(const Packet& packet, absl::Span<const std::byte> behind) = 0;
  // The next packet that has come. `behind` is valid until heard(), which must be called.
  virtual bool hear(Packet& packet, absl::Span<const std::byte>& behind) = 0;
  virtual void heard() = 0;
  // A receive waits for what this peer sends.
  virtual void expect() {}

  // True: the receiver reads where the sender shows; false: the sender writes where the receiver
  // grants.
  virtual bool reads() const = 0;
  // For a link that reads. Where the peer can read these bytes; false: nowhere, as long as they are
  // not copied into memory of ours.
  virtual bool show(const std::byte*, size_t, Place&) { return false; }
  // The bytes that the peer exposed. Unavailable: ask again.
  virtual absl::StatusOr<const std::byte*> look(const Place&, size_t) {
    return absl::UnimplementedError("this link reads nothing in place");
  }
  // After the last look at `bytes`: whether they were still what the peer has sent.
  virtual bool looked_well(size_t) { return true; }
  // For a link that writes. Where the peer may write these bytes; false: nowhere, likewise.
  virtual bool grant(std::byte*, size_t, Place&) { return false; }
  // True if write() can take these bytes from where they are.
  virtual bool can_write(const std::byte*, size_t) const { return false; }
  // Writes them to a place that the peer granted, then tells it `packet`. Returns a number for
  // written(), or 0 if there is no room: ask again.
  virtual uint32_t write(const std::byte*, size_t, const Place&, const Packet&) { return 0; }
  // True when the source of that write may be overwritten; the number is invalid from then on.
  virtual bool written(uint32_t) { return true; }

  // The other side may be asleep: make sure that it looks. After a batch of the above.
  virtual void flush() {}

  // True if the peer reads sent data in this rank's memory: those lines are then in the peer's
  // caches.
  virtual bool peer_reads_in_place() const { return false; }

  // OK, or why messages can no longer be sent.
  virtual absl::Status status() const { return absl::OkStatus(); }

  // For people: "shm, direct", "tcp 10.0.0.2:4000 (cubic, 4 sockets)".
  virtual std::string route() const = 0;
};

inline bool Link::Place::set(absl::Span<const std::byte> from) {
  if (from.size() > bytes.size()) return false;
  std::copy(from.begin(), from.end(), bytes.begin());
  size = static_cast<uint32_t>(from.size());
  return true;
}

}  // namespace baton::collectives::executor
