// Staged transfers of ours: cut into chunks, each of which goes through its steps by itself.
#include <algorithm>

#include "absl/strings/str_format.h"
#include "transport/internal/staging/cut.h"
#include "transport/internal/worker/staging.h"

namespace baton::internal {
namespace {

// Two or three steps, each with two copies on its stream, or one under way and one ready for it;
// and words about them on their way.
constexpr uint32_t kMostChunks = 8;
constexpr uint32_t kMostChunksOfAPeer = 64;
// That cannot begin, in a round: however many wait, what has come is worth no more.
constexpr size_t kMostRefused = 64;

}  // namespace

absl::Status Staging::begin(uint32_t index, Peer& peer) {
  TransferSlot& slot = worker_.slots[index];
  const TransferDescriptor& d = slot.descriptor;
  auto op = std::make_unique<Op>();
  op->id = d.id;
  op->peer = peer.id();
  op->far = d.remote.kind != MemoryKind::kHost;
  op->urgent = d.bytes <= kUrgentBytes;
  op->chunk = chunk_bytes(d.bytes);
  if (const MemoryPlace& place = worker_.regions.entries()[d.local_region].place;
      place.kind != MemoryKind::kHost) {
    op->near = ring_of(place.device);
    if (op->near == nullptr) {
      return absl::FailedPreconditionError(absl::StrFormat(
          "no connection to %s reaches memory of %s, and there is no staging ring for it",
          peer.name, place.name()));
    }
    if (absl::Status status = op->near->copies->alive(); !status.ok()) return status;
  }
  worker_.dispatcher.dequeue(peer, index);
  slot.staged = true;
  slot.slice_bytes = d.bytes;
  slot.slices = slot.next_slice = slot.outstanding = 1;
  (op->urgent ? urgent_ : bulk_).ops.push_back(index);
  ops_[index] = std::move(op);
  ++worker_.stats.staged_transfers;
  due_ = true;
  return absl::OkStatus();
}

Staging::Op* Staging::op_of(const Chunk& chunk) {
  const auto op = ops_.find(chunk.parent.slot);
  return op != ops_.end() && op->second->id == chunk.parent ? op->second.get() : nullptr;
}

Staging::Chunk* Staging::find_chunk(Handle name, PeerId peer) {
  if (name.generation == 0 || name.index >= chunks_.size()) return nullptr;
  Chunk& chunk = *chunks_[name.index];
  return chunk.name == name && chunk.peer == peer ? &chunk : nullptr;
}

bool Staging::feed() {
  const bool any = feed(urgent_);
  return feed(bulk_) || any;
}

// In turn, so that a long transfer does not keep others from beginning.
bool Staging::feed(Waiting& waiting) {
  std::deque<uint32_t>& list = waiting.ops;
  bool any = false;
  for (size_t refused = 0; waiting.refused < list.size() && refused < kMostRefused;) {
    const uint32_t index = list.front();
    list.pop_front();
    const auto found = ops_.find(index);
    if (found == ops_.end()) continue;
    Op& op = *found->second;
    const TransferSlot& slot = worker_.slots[index];
    if (slot.verdict != TransferState::kActive || op.next == slot.descriptor.bytes) continue;
    if (start_chunk(op)) {
      waiting.refused = 0;
      any = true;
    } else {
      ++waiting.refused;
      ++refused;
    }
    if (op.next < slot.descriptor.bytes) list.push_back(index);
  }
  asking_ |= waiting.refused < list.size();
  return any;
}

Staging::Chunk& Staging::open_chunk(Op& op) {
  if (free_chunks_.empty()) {
    free_chunks_.push_back(static_cast<uint32_t>(chunks_.size()));
    chunks_.push_back(std::make_unique<Chunk>());
    chunks_.back()->name.index = free_chunks_.back();
  }
  Chunk& chunk = *chunks_[free_chunks_.back()];
  free_chunks_.pop_back();
  std::vector<uint32_t> index = std::move(chunk.index);
  chunk = Chunk{.name = {chunk.name.index, next_generation()}, .parent = op.id, .peer = op.peer};
  chunk.index = std::move(index);
  ++opened_[op.peer.index];
  op.chunks.push_back(chunk.name.index);
  return chunk;
}

// As much from `next` on as both sides allow; the host's side is cut where its pieces end.
size_t Staging::cut_chunk(const Op& op, size_t most, Layout& layout, std::vector<uint32_t>& index) {
  const TransferDescriptor& d = worker_.slots[op.id.slot].descriptor;
  const Layout* host = nullptr;
  if (op.near == nullptr) host = &d.local;
  if (!op.far) host = &d.remote_layout;
  while (true) {
    size_t end = op.next + most;
    if (host != nullptr) end = cut(*host, op.next, most, layout, index);
    size_t fits = end;
    if (op.near != nullptr) fits = runs_of(d.local, op.next, fits - op.next, runs_);
    if (op.far) fits = runs_of(d.remote_layout, op.next, fits - op.next, runs_);
    if (fits == end || host == nullptr) return fits;
    most = fits - op.next;
  }
}

bool Staging::start_chunk(Op& op) {
  const TransferSlot& slot = worker_.slots[op.id.slot];
  const TransferDescriptor& d = slot.descriptor;
  const Peer* peer = worker_.find_peer(op.peer);
  if (peer == nullptr || peer->state != PeerState::kUp || op.chunks.size() >= kMostChunks ||
      opened_[op.peer.index] >= kMostChunksOfAPeer) {
    return false;
  }
  const size_t most = std::min(op.chunk, d.bytes - op.next);
  Room near;
  if (op.near != nullptr) {
    const std::optional<size_t> offset = op.near->ours.take(most, op.urgent, op.peer.index);
    if (!offset) return false;
    near = {op.near, *offset, most};
  }
  Chunk& chunk = open_chunk(op);
  chunk.near = near;
  chunk.begin = op.next;
  chunk.end = op.next = cut_chunk(op, most, chunk.layout, chunk.index);
  chunk.lent = may_offer(op, *peer);
  chunk.granted = !op.far || chunk.lent;
  chunk.copied = op.near == nullptr || d.op == baton::Op::kRead;
  if (!chunk.granted) ask(chunk, op);
  if (!chunk.copied) {
    start_copy(chunk, op, CopyDirection::kToHost, near.ring->marks.ring() + near.offset);
  }
  step(chunk);
  return true;
}

void Staging::start_copy(Chunk& chunk, const Op& op, CopyDirection direction, std::byte* host) {
  const TransferSlot& slot = worker_.slots[op.id.slot];
  runs_of(slot.descriptor.local, chunk.begin, chunk.end - chunk.begin, runs_);
  chunk.copying = true;
  copy(*chunk.near.ring, direction, false, chunk.name, op.urgent, host, slot.descriptor.local_base,
       runs_);
}

void Staging::ask(Chunk& chunk, const Op& op) {
  const TransferDescriptor& d = worker_.slots[op.id.slot].descriptor;
  Message message{.kind = d.op == baton::Op::kWrite ? Message::Kind::kWant : Message::Kind::kFetch,
                  .chunk = chunk.name,
                  .region = d.remote,
                  .bytes = chunk.end - chunk.begin,
                  .urgent = op.urgent};
  if (d.op == baton::Op::kRead) {
    runs_of(d.remote_layout, chunk.begin, message.bytes, message.runs);
  }
  chunk.asked = true;
  say(op.peer, message);
}

// Does the chunk's next step.
void Staging::step(Chunk& chunk) {
  if (worker_.slots[chunk.parent.slot].verdict != TransferState::kActive) return wind_down(chunk);
  if (chunk.copying || chunk.wired || chunk.landing || !chunk.granted || !chunk.copied) return;
  if (chunk.sent) return close_chunk(chunk);
  if (chunk.lent) return offer(chunk);
  if (read_in_place(chunk)) return;
  chunk.wired = true;
  if (start_wire(chunk)) return;
  unwired_.push_back(chunk.name);
  due_ = true;
}

bool Staging::start_wire(Chunk& chunk) {
  if (!may_start(chunk.peer)) return false;
  const TransferSlot& parent = worker_.slots[chunk.parent.slot];
  const TransferDescriptor& whole = parent.descriptor;
  const size_t bytes = chunk.end - chunk.begin;
  TransferDescriptor part{.op = whole.op, .bytes = bytes};
  const MemoryRegion local = chunk.near.ring != nullptr ? chunk.near.ring->region : parent.local;
  part.local_base = local.base;
  part.local_region = local.index;
  part.local =
      chunk.near.ring != nullptr ? Layout::contiguous(chunk.near.offset, bytes) : chunk.layout;
  std::string words;
  if (chunk.far.generation == 0) {
    part.remote = whole.remote;
    part.remote_layout = chunk.layout;
  } else {
    part.remote = chunk.far_ring;
    part.remote_layout = Layout::contiguous(chunk.far_offset, bytes);
    if (whole.op == baton::Op::kWrite) {
      Message land{.kind = Message::Kind::kLand,
                   .chunk = chunk.name,
                   .room = chunk.far,
                   .region = whole.remote,
                   .bytes = bytes};
      runs_of(whole.remote_layout, chunk.begin, bytes, land.runs);
      land.encode(words);
      part.counter = {whole.remote.owner, CounterTable::kStaging, 1};
    }
  }
  if (!start(chunk.peer, chunk.name, part, local, std::move(words), &chunk.wire)) return false;
  chunk.touched = true;
  return true;
}

void Staging::on_wire_end(Handle name, const absl::Status& status) {
  Chunk& chunk = *chunks_[name.index];
  if (chunk.name != name) return;
  const bool reading = worker_.slots[chunk.parent.slot].descriptor.op == baton::Op::kRead;
  chunk.wired = false;
  chunk.wire = {};
  if (!status.ok()) return fail(chunk, status);
  chunk.sent = true;
  chunk.landing = !reading && chunk.far.generation != 0;
  if (reading && chunk.far.generation != 0) release_room(chunk);
  const Op* op = op_of(chunk);
  const bool wanted = worker_.slots[chunk.parent.slot].verdict == TransferState::kActive;
  if (reading && wanted && op != nullptr && op->near != nullptr) {
    start_copy(chunk, *op, CopyDirection::kToDevice,
               chunk.near.ring->marks.ring() + chunk.near.offset);
  }
  step(chunk);
}

// Returns room that no chunk waits for any more.
void Staging::on_room(Chunk* chunk, PeerId peer, const Message& message) {
  const bool stopped = chunk != nullptr && chunk->asked && chunk->parent.generation == 0;
  // It must be in a ring, as a correct peer's is. Device memory would need staging itself.
  const bool room = chunk != nullptr && message.room.generation != 0 &&
                    message.region.kind == MemoryKind::kHost &&
                    message.bytes >= chunk->end - chunk->begin;
  if (chunk == nullptr || !chunk->asked || stopped || !room) {
    say(peer, {.kind = Message::Kind::kRelease, .chunk = message.chunk, .room = message.room});
    if (stopped) return retire(*chunk);
    if (chunk == nullptr || !chunk->asked) return;
    chunk->asked = false;
    return fail(*chunk,
                absl::InvalidArgumentError(
                    "the peer offered invalid staging space: run the same release on both sides"));
  }
  chunk->asked = false;
  chunk->granted = true;
  chunk->far = message.room;
  chunk->far_ring = message.region;
  chunk->far_offset = message.offset;
  step(*chunk);
}

void Staging::on_ended(Chunk& chunk, absl::Status status) {
  if (chunk.parent.generation == 0) return retire(chunk);
  // Nothing went there yet, so nothing can be there.
  const bool active = worker_.slots[chunk.parent.slot].verdict == TransferState::kActive;
  if (status.ok() && active && !chunk.touched && !chunk.landing) {
    status = absl::InvalidArgumentError(
        "the peer reports staged bytes that were never sent: run the same release on both sides");
  }
  chunk.landing = chunk.asked = false;
  chunk.far = {};
  if (!status.ok()) return fail(chunk, std::move(status));
  step(chunk);
}

void Staging::on_copied(Chunk& chunk, absl::Status status) {
  chunk.copying = false;
  if (chunk.in_place.from != nullptr) {
    give_back(chunk.in_place);
    if (chunk.far.generation != 0) release_room(chunk);
  }
  if (!status.ok()) return fail(chunk, std::move(status));
  chunk.copied = true;
  step(chunk);
}

void Staging::fail(Chunk& chunk, absl::Status why) {
  const Handle name = chunk.name;
  worker_.transfers.stop(chunk.parent.slot, TransferState::kFailed, std::move(why));
  if (chunk.name == name) wind_down(chunk);
}

void Staging::release_room(Chunk& chunk) {
  say(chunk.peer, {.kind = Message::Kind::kRelease, .chunk = chunk.name, .room = chunk.far});
  chunk.far = {};
}

// Its transfer was stopped: it is closed once nothing of it moves.
void Staging::wind_down(Chunk& chunk) {
  const Peer* peer = worker_.find_peer(chunk.peer);
  if (peer == nullptr || peer->state == PeerState::kDown) {  // it has no say any more
    chunk.landing = chunk.asked = false;
    chunk.far = {};
  }
  if (chunk.copying) chunk.near.ring->copies->drop(cookie_of(chunk.name, false));
  if (chunk.wired) {
    if (chunk.wire.generation == 0) {
      chunk.wired = false;
    } else {
      worker_.transfers.stop(chunk.wire.slot, TransferState::kCancelled,
                             absl::CancelledError("the staged transfer was stopped"));
    }
  }
  // The target has not begun to read it, and never will.
  if (chunk.lent) chunk.near.ring->marks.take_back(chunk.near.offset);
  if (chunk.wired || chunk.landing) return;
  if (chunk.far.generation != 0) {
    // The target may have all of a write that was on the wire, and be copying it.
    const bool write = worker_.slots[chunk.parent.slot].descriptor.op == baton::Op::kWrite;
    const Handle room = chunk.far;
    release_room(chunk);
    if (write && chunk.touched) {
      chunk.far = room;
      chunk.landing = true;
      return;
    }
  }
  if (!chunk.copying) close_chunk(chunk);
}

void Staging::close_chunk(Chunk& chunk) {
  if (chunk.near.ring != nullptr) {
    give_back(chunk.near, chunk.near.ring->ours, chunk.lent);
  }
  due_ = true;
  Op* op = op_of(chunk);
  const TransferId parent = chunk.parent;
  chunk.parent = {};
  // A chunk that has asked for room counts until the answer comes: a peer gets a bounded number of
  // requests.
  if (!chunk.asked) retire(chunk);
  if (op == nullptr) return;
  std::erase(op->chunks, chunk.name.index);
  const TransferSlot& slot = worker_.slots[parent.slot];
  const bool more = slot.verdict == TransferState::kActive && op->next < slot.descriptor.bytes;
  if (op->chunks.empty() && !more) close_op(parent.slot);
}

void Staging::retire(Chunk& chunk) {
  --opened_[chunk.peer.index];
  chunk.name.generation = 0;
  free_chunks_.push_back(chunk.name.index);
  due_ = true;
}

// All bytes are where they belong, or none moves any more. What else the transfer carries goes as a
// transfer of no bytes.
void Staging::close_op(uint32_t index) {
  ops_.erase(index);
  TransferSlot& slot = worker_.slots[index];
  TransferDescriptor& d = slot.descriptor;
  slot.staged = false;
  slot.outstanding = 0;
  Peer* peer = worker_.find_peer(slot.peer);
  if (slot.verdict == TransferState::kActive && peer != nullptr) {
    slot.landed = slot.slices;
    if (d.counter.generation != 0 || !d.notify.empty()) {
      worker_.stats.bytes_moved += d.bytes;
      d.bytes = 0;
      d.local_base = nullptr;
      d.local = d.remote_layout = Layout();
      slot.slice_bytes = 1;
      slot.next_slice = slot.landed = 0;
      worker_.dispatcher.enqueue(*peer, index);
      return;
    }
  }
  worker_.transfers.maybe_finish(index);
}

void Staging::stopped(uint32_t index) {
  const auto op = ops_.find(index);
  if (op == ops_.end()) return;
  const std::vector<uint32_t> open = op->second->chunks;
  if (open.empty()) return close_op(index);
  for (const uint32_t each : open) wind_down(*chunks_[each]);
}

}  // namespace baton::internal
