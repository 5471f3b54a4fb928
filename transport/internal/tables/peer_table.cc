// Rows for peers, and the words that tell other threads of them.
#include "transport/internal/tables/peer_table.h"

namespace baton::internal {

PeerTable::~PeerTable() {
  for (auto& chunk : shown_) delete chunk.load(std::memory_order_relaxed);
}

uint64_t PeerTable::word(uint32_t index) const {
  if (index >= kMost) return 0;
  const Chunk* chunk = shown_[index / kChunk].load(std::memory_order_acquire);
  return chunk == nullptr ? 0 : (*chunk)[index % kChunk].word.load(std::memory_order_acquire);
}

bool PeerTable::knows(PeerId id) const {
  return id.generation != 0 && word(id.index) >> 8 == id.generation;
}

PeerState PeerTable::state(PeerId id) const {
  const uint64_t now = word(id.index);
  if (id.generation == 0 || now >> 8 != id.generation) return PeerState::kDown;
  return static_cast<PeerState>((now & 0xff) - 1);
}

void PeerTable::set_state(Peer& peer, PeerState state) {
  peer.state = state;
  if (state == PeerState::kDown && peer.unread == 0) may_forget(peer);
  (*shown_[peer.index / kChunk].load(std::memory_order_relaxed))[peer.index % kChunk].word.store(
      (uint64_t{peer.generation} << 8) | (static_cast<uint64_t>(state) + 1),
      std::memory_order_release);
}

void PeerTable::all_read(Peer& peer) {
  if (peer.state == PeerState::kDown) may_forget(peer);
}

void PeerTable::may_forget(Peer& peer) {
  if (!std::exchange(peer.may_be_forgotten, true)) down_.push_back(peer.index);
}

// What came last, when it was down already, may not be read yet.
Peer* PeerTable::oldest_to_forget() {
  for (; !down_.empty(); down_.pop_front()) {
    Peer& oldest = *rows_[down_.front()];
    if (oldest.unread == 0) return &oldest;
    oldest.may_be_forgotten = false;
  }
  return nullptr;
}

Peer* PeerTable::add() {
  auto index = static_cast<uint32_t>(rows_.size());
  uint32_t generation = 1;
  Peer* const oldest = down_.size() > kRemembered || index == kMost ? oldest_to_forget() : nullptr;
  if (oldest != nullptr) {
    down_.pop_front();
    Peer& old = *oldest;
    index = old.index;
    forget_session(old);
    generation = old.generation + 1 == 0 ? 1 : old.generation + 1;
    // It may still be on the worker's lists.
    Peer fresh;
    fresh.ready = old.ready;
    fresh.creditor = old.creditor;
    const std::lock_guard lock(names_);
    old = std::move(fresh);
  } else if (index == kMost) {
    return nullptr;
  } else {
    std::atomic<Chunk*>& chunk = shown_[index / kChunk];
    if (chunk.load(std::memory_order_relaxed) == nullptr) {
      chunk.store(new Chunk{}, std::memory_order_release);
    }
    const std::lock_guard lock(names_);
    rows_.push_back(std::make_unique<Peer>());
  }
  Peer& peer = *rows_[index];
  {
    const std::lock_guard lock(names_);
    peer.index = index;
    peer.generation = generation;
  }
  set_state(peer, PeerState::kConnecting);
  return &peer;
}

Peer* PeerTable::find(PeerId id) {
  if (id.generation == 0 || id.index >= rows_.size()) return nullptr;
  Peer* peer = rows_[id.index].get();
  return peer->generation == id.generation ? peer : nullptr;
}

void PeerTable::set_name(Peer& peer, std::string_view name) {
  const std::lock_guard lock(names_);
  peer.name = name;
}

std::string PeerTable::name(PeerId id) const {
  const std::lock_guard lock(names_);
  if (id.generation == 0 || id.index >= rows_.size()) return "";
  const Peer& peer = *rows_[id.index];
  return peer.generation == id.generation ? peer.name : "";
}

PeerShare& PeerTable::share(PeerId id) {
  return (*shown_[id.index / kChunk].load(std::memory_order_acquire))[id.index % kChunk].share;
}

PeerTable::Usage PeerTable::usage() const {
  Usage out;
  for (uint32_t index = 0; index < kMost; ++index) {
    const Chunk* chunk = shown_[index / kChunk].load(std::memory_order_acquire);
    if (chunk == nullptr) break;
    const Shown& shown = (*chunk)[index % kChunk];
    const uint32_t open = shown.share.open().all;
    out.open += open;
    if (open <= out.most) continue;
    out.most = open;
    out.peer = {index, static_cast<uint32_t>(shown.word.load(std::memory_order_acquire) >> 8)};
  }
  return out;
}

void PeerTable::forget_session(const Peer& peer) {
  const auto found = sessions_.find(key_of(peer));
  if (found != sessions_.end() && found->second == peer.index) sessions_.erase(found);
}

void PeerTable::set_session(Peer& peer, uint64_t session) {
  forget_session(peer);
  peer.session = session;
  sessions_[key_of(peer)] = peer.index;
}

Peer* PeerTable::of_session(const WorkerUid& uid, uint64_t session, bool dialled) {
  const auto found = sessions_.find(Session{uid.bytes, {session, dialled}});
  return found == sessions_.end() ? nullptr : rows_[found->second].get();
}

}  // namespace baton::internal
