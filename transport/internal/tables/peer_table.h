// The peers of a worker: rows with generations, found by their id or by their session.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "transport/internal/tables/peer.h"
#include "transport/internal/tables/transfer_slots.h"
#include "transport/region.h"

namespace baton::internal {

// Rows are made as peers come, and used again when many of them have gone down: a peer that is down
// can still be asked why. One whose notifications are in the inbox is not forgotten before they are
// read, however many went after it: who reads them wants to know whose they are. A Peer& stays
// where it is for as long as the table lives.
class PeerTable {
 public:
  static constexpr uint32_t kMost = 1 << 16;  // peers at a time
  // Peers that are down, and of which nothing is unread, before the oldest is forgotten.
  static constexpr size_t kRemembered = 1024;

  PeerTable() = default;
  ~PeerTable();
  PeerTable(const PeerTable&) = delete;
  PeerTable& operator=(const PeerTable&) = delete;

  // A new peer, connecting; null when kMost are in use.
  Peer* add();
  Peer* find(PeerId id);
  // By Rail::worker_tag, which is tag_of() its peer.
  Peer* of(const Rail& rail) {
    return find(
        {static_cast<uint32_t>(rail.worker_tag), static_cast<uint32_t>(rail.worker_tag >> 32)});
  }
  static uint64_t tag_of(PeerId id) { return (uint64_t{id.generation} << 32) | id.index; }
  void set_state(Peer& peer, PeerState state);
  // Nothing of it is unread any more.
  void all_read(Peer& peer);
  // Any thread. kDown also for a peer that was forgotten.
  PeerState state(PeerId id) const;
  // Any thread. Whether the id is that of a peer, and not forgotten.
  bool knows(PeerId id) const;

  void set_name(Peer& peer, std::string_view name);
  // Any thread. For messages; "" where it is not known.
  std::string name(PeerId id) const;

  // Any thread, of a peer that is or was known. It is the row's: what a forgotten peer still has
  // open counts for the next one.
  PeerShare& share(PeerId id);
  struct Usage {
    uint64_t open = 0;  // transfers of all peers
    uint32_t most = 0;  // those of the peer that has most
    PeerId peer;        // this one
  };
  // Any thread. Looks at all rows.
  Usage usage() const;

  // A peer has one session at a time: `dialled` by us or by the worker `uid`, which chose the
  // number.
  void set_session(Peer& peer, uint64_t session);  // its uid and `dialled` must be set
  Peer* of_session(const WorkerUid& uid, uint64_t session, bool dialled);

  size_t size() const { return rows_.size(); }
  Peer& operator[](size_t index) { return *rows_[index]; }

 private:
  using Session = std::pair<std::array<uint8_t, 16>, std::pair<uint64_t, bool>>;
  static Session key_of(const Peer& peer) { return {peer.uid.bytes, {peer.session, peer.dialled}}; }
  void forget_session(const Peer& peer);
  void may_forget(Peer& peer);
  Peer* oldest_to_forget();
  // The part of a row that other threads read, in chunks that never move.
  struct Shown {
    std::atomic<uint64_t> word{0};  // generation << 8 | PeerState + 1
    PeerShare share;
  };
  static constexpr size_t kChunk = 1024;
  using Chunk = std::array<Shown, kChunk>;
  uint64_t word(uint32_t index) const;

  mutable std::mutex names_;  // of rows_ and its names, where other threads look at them
  std::vector<std::unique_ptr<Peer>> rows_;
  std::array<std::atomic<Chunk*>, kMost / kChunk> shown_{};
  std::deque<uint32_t> down_;  // rows to forget, the one that went first, or was read, in front
  absl::flat_hash_map<Session, uint32_t> sessions_;
};

}  // namespace baton::internal
