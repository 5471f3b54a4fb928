// Staged transfers: those with memory of a device on a side that no rail reaches by itself.
//
// The worker that has such memory has a ring of pinned memory for the device (StagingRing). A
// staged transfer is cut into chunks; each is copied off the device into the ring, goes over the
// wire as a transfer of the worker's own, and is copied from the target's ring to its device. Rails
// move only memory of the host, so every provider carries it, and what is promised of rails that
// are lost and of peers that are called again holds for chunks too.
//
//   - Our chunks and those that we serve have a half of the ring each: two workers that stage for
//     each other cannot wait for each other's room. A served chunk that has room is waited for by
//     no worker but its initiator, who has its own room already.
//   - Small transfers go first, in room that is kept for them, on the wire, and at each copy.
//   - A peer on the same machine maps our ring, and we map its: what the one has copied off its
//     device the other copies to its own from where it lies, and no processor copies any of it
//     (staging/ring_marks.h). Until the other's ring is pinned here, and over every other route,
//     chunks go from ring to ring.
//   - A ring that is full makes transfers wait, and no progress() ever does. A peer that has room
//   in
//     it leaves some to those that have none, and what waits for it is passed by.
//   - The transfer has ended when all its chunks have, also when it was stopped: copies under way
//     here are awaited, and a target that may be copying is asked. Counter and notification then
//     travel with a message of their own.
//
// Internal to the worker, all under its progress lock.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "transport/internal/device_memory.h"
#include "transport/internal/messages/control_message.h"
#include "transport/internal/staging/pinner.h"
#include "transport/internal/staging/ring_marks.h"
#include "transport/internal/worker/core.h"

namespace baton::internal {

class Staging {
 public:
  explicit Staging(WorkerCore& worker);
  ~Staging();  // waits for the copies

  // ---- rings: staging.cc ----
  bool has_ring(int device) const { return ring_of(device) != nullptr; }
  // Makes the ring's memory a region like any other.
  absl::Status add_ring(int device, std::unique_ptr<StagingRing> made);
  // Why device memory that was registered is staged: for explain().
  void note(int device, std::string why);
  std::string explain(PeerId peer) const;

  // ---- our transfers: staging_ours.cc ----
  // Takes over a transfer that is queued. The reason where it cannot be staged.
  absl::Status begin(uint32_t index, Peer& peer);
  // It was stopped: it ends when nothing of it moves any more.
  void stopped(uint32_t index);

  // ---- for others: staging_served.cc ----
  // Fences: copies to and from the region are over, and none will begin. It is stale already.
  void forget(const RegionEntry& region);

  void hear(Peer& peer, const Rail& rail, std::string_view words);
  void peer_down(PeerId peer);
  void peer_up() { due_ = true; }
  bool progress();
  bool busy() const;        // progress() wants to be called soon
  Time next_timer() const;  // when it wants to be called, though nothing wakes it
  void finish();            // no peer is left: waits until nothing moves

 private:
  using Message = StagingMessage;

  struct Ring {
    Ring(int number, std::unique_ptr<StagingRing> made);
    int device;
    std::unique_ptr<StagingRing> copies;
    RingMarks marks;
    MemoryRegion region;
    RingSpace ours;
    RingSpace served;
    std::string why;
  };
  struct Room {
    Ring* ring = nullptr;
    size_t offset = 0;
    size_t bytes = 0;
  };
  // A peer's ring that is mapped here.
  struct Borrowed {
    enum class State : uint8_t { kWanted, kPinning, kReady, kRefused };
    uint64_t name = 0;
    PeerId peer;
    RemoteRegion region;
    Handle number;  // the peer's for it; generation 0: it has not asked
    State state = State::kWanted;
    RemoteView view;
    RingMarks marks;
    Pinner::Pin pin;
    uint32_t users = 0;  // chunks that are copied from there
    uint64_t bytes = 0;  // of those that were
    bool gone = false;   // its owner is
  };
  // Transfers of ours with bytes that have not begun.
  struct Waiting {
    std::deque<uint32_t> ops;
    size_t refused = 0;  // one after the other, since something was due
  };
  // Room that the peer was lent, in one of them.
  struct Borrow {
    Borrowed* from = nullptr;
    size_t offset = 0;
  };
  // Room of ours that the peer may still read, though it is gone.
  struct LeftBehind {
    Room room;
    RingSpace* space = nullptr;
  };
  // Part of a transfer of ours that is under way.
  struct Chunk {
    Handle name;  // generation 0: free
    TransferId parent;
    PeerId peer;
    size_t begin = 0;
    size_t end = 0;
    Room near;              // where our side is on a device
    Handle far;             // the target's room, once it has given some
    RemoteRegion far_ring;  // and where that is
    uint64_t far_offset = 0;
    Borrow in_place;       // of a read that is copied from the target's ring
    bool lent = false;     // of a write that the target copies from our ring
    bool asked = false;    // the target has been asked for room
    bool granted = false;  // it has given some, or none is needed
    bool copied = false;   // what is to be sent lies where it is sent from
    bool copying = false;  // here, between ring and device
    bool wired = false;    // waits for the wire, or is on it
    bool sent = false;     // the wire has done its part
    bool touched = false;  // it has been on the wire
    bool landing = false;  // the target will say how it ended
    TransferId wire;
    Layout layout;  // of the side that is the host's
    std::vector<uint32_t> index;
  };
  // A transfer of ours. One of the worker's slots stays with it, as if one slice was outstanding.
  struct Op {
    TransferId id;
    PeerId peer;
    Ring* near = nullptr;  // our side is on a device
    bool far = false;      // the other side is
    bool urgent = false;
    size_t chunk = 0;              // bytes
    size_t next = 0;               // not begun from here on
    std::vector<uint32_t> chunks;  // the open ones
  };
  // A chunk that a peer wants to write to, or read from, memory of a device of ours.
  struct Served {
    enum class State : uint8_t { kWaiting, kRoom, kCopying };
    Handle name;  // generation 0: free
    PeerId peer;
    Handle chunk;
    Room room;
    RemoteRegion region;
    size_t bytes = 0;
    State state = State::kWaiting;
    bool write = false;
    bool urgent = false;
    bool gone = false;  // its initiator is, or wants no more of it
    bool lent = false;  // of a read whose initiator may copy from our ring
    Borrow in_place;    // of a write that is copied from the initiator's ring
    std::vector<Run> runs;
  };
  struct Outgoing {
    PeerId peer;
    std::string words;
  };

  static constexpr uint32_t kMostServed = 256;  // of a peer: more than a correct one has under way

  static constexpr uint64_t cookie_of(Handle name, bool served) {
    return uint64_t{name.generation} << 32 | uint64_t{name.index} << 1 | uint64_t{served};
  }

  // staging.cc
  Ring* ring_of(int device) const;
  uint32_t next_generation();
  void say(PeerId peer, const Message& message);
  bool send_what_waits();
  bool may_start(PeerId peer);
  bool start(PeerId peer, Handle chunk, TransferDescriptor transfer, const MemoryRegion& local,
             std::string words, TransferId* started);
  static void wire_ended(void* self, TransferId id, const absl::Status& status);
  void copy(Ring& ring, CopyDirection direction, bool served, Handle name, bool urgent,
            std::byte* host, const std::byte* base, const std::vector<Run>& runs);
  void copy_ended(uint64_t cookie, absl::Status status);
  bool run_rings();

  // staging_ours.cc
  Op* op_of(const Chunk& chunk);
  Chunk* find_chunk(Handle name, PeerId peer);
  Chunk& open_chunk(Op& op);
  bool feed();
  bool feed(Waiting& waiting);
  bool start_chunk(Op& op);
  size_t cut_chunk(const Op& op, size_t most, Layout& layout, std::vector<uint32_t>& index);
  void start_copy(Chunk& chunk, const Op& op, CopyDirection direction, std::byte* host);
  void ask(Chunk& chunk, const Op& op);
  void step(Chunk& chunk);
  bool start_wire(Chunk& chunk);
  void on_wire_end(Handle name, const absl::Status& status);
  void on_room(Chunk* chunk, PeerId peer, const Message& message);
  void on_ended(Chunk& chunk, absl::Status status);
  void on_copied(Chunk& chunk, absl::Status status);
  void fail(Chunk& chunk, absl::Status why);
  void wind_down(Chunk& chunk);
  void release_room(Chunk& chunk);
  void close_chunk(Chunk& chunk);
  void retire(Chunk& chunk);
  void close_op(uint32_t index);

  // staging_lending.cc
  bool shows_rings(const Peer& peer) const;
  bool may_offer(const Op& op, const Peer& peer);
  void offer(Chunk& chunk);
  bool read_in_place(Chunk& chunk);
  void on_ring(Peer& peer, const Message& message);
  void on_borrows(PeerId peer, const Message& message);
  void on_offer(PeerId peer, Message message);
  Borrowed* borrowed(Peer& peer, const RemoteRegion& ring);
  absl::Status begin_borrowing(Borrowed& from);
  bool tend_borrowed();
  static std::byte* take(Borrowed& from, size_t offset, size_t bytes, Borrow& borrow);
  void give_back(Borrow& borrow);
  std::string explain_lending(PeerId peer) const;
  void give_back(Room& room, RingSpace& space, bool lent);
  bool take_back();
  void lent_peer_down(PeerId peer);

  // staging_served.cc
  Served& open_served(PeerId peer, Message message);
  Served* find_served(Handle name, PeerId peer);
  void on_request(PeerId peer, Message message);
  void on_land(PeerId peer, const Message& message);
  void on_release(PeerId peer, const Message& message);
  void on_served_copied(Served& served, absl::Status status);
  bool give_room();
  bool give_room(std::deque<Handle>& list);
  bool begin_serving(Served& served);
  absl::StatusOr<std::byte*> base_of(const RemoteRegion& region, bool write, size_t bytes,
                                     const std::vector<Run>& runs);
  void answer(const Served& served, absl::Status status);
  void close_served(Served& served);
  void withdraw(const Served& served);

  WorkerCore& worker_;
  std::vector<std::unique_ptr<Ring>> rings_;
  absl::flat_hash_map<uint32_t, std::unique_ptr<Op>> ops_;  // by the slot of the transfer
  Waiting urgent_;
  Waiting bulk_;
  std::vector<std::unique_ptr<Chunk>> chunks_;
  std::vector<uint32_t> free_chunks_;
  std::vector<std::unique_ptr<Served>> served_;
  std::vector<uint32_t> free_served_;
  std::deque<Handle> want_urgent_;  // served that wait for room
  std::deque<Handle> want_bulk_;
  std::deque<Outgoing> unsaid_;
  std::deque<Handle> unwired_;  // chunks that wait for a slot
  // By reserved slot: the chunk that is on the wire in it, and with whom.
  std::vector<std::pair<Handle, PeerId>> on_wire_;
  absl::flat_hash_map<uint32_t, uint32_t> wires_;   // under way, by peer
  absl::flat_hash_map<uint32_t, uint32_t> opened_;  // chunks of ours, by peer
  absl::flat_hash_map<uint32_t, uint32_t> serves_;  // chunks served, by peer
  uint32_t wires_in_all_ = 0;
  uint32_t generation_ = 0;
  bool due_ = false;     // something changed that lets others begin
  bool asking_ = false;  // which of them has not been found out yet
  // Rings of ours that a peer has been told of; those that it borrows from, and how many bytes.
  // Both by name_of().
  absl::flat_hash_set<uint64_t> shown_;
  absl::flat_hash_map<uint64_t, uint64_t> lent_to_;
  std::vector<std::unique_ptr<Borrowed>> borrowed_;
  uint64_t borrowed_names_ = 0;
  bool borrowing_ = false;  // one of them changes
  // A lent chunk is copied at once: a sleep in between would cost more than the copy.
  static constexpr Time kAwake = std::chrono::microseconds(200);
  Time awake_until_ = kNever;  // kNever: nothing was offered
  std::vector<LeftBehind> left_behind_;
  Time look_at_readers_{};
  std::vector<CopyRun> copy_runs_;
  std::vector<Run> runs_;
  Pinner pinner_;
};

}  // namespace baton::internal
