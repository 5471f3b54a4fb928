// Common code of staged transfers in both directions: rings, messages, and slots.
#include "transport/internal/worker/staging.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "transport/internal/device_memory.h"
#include "transport/internal/mapped.h"

namespace baton::internal {
namespace {

// The most slots used of those reserved from callers. One lost peer must not hold them all, since
// lost rails must be queried too.
constexpr uint32_t kMostWires = 96;
constexpr uint32_t kMostWiresOfAPeer = 32;
constexpr ptrdiff_t kMostQueued = 1024;  // to one peer; one that asks for more is closed

}  // namespace

Staging::Ring::Ring(int number, std::unique_ptr<StagingRing> made)
    : device(number),
      copies(std::move(made)),
      marks(copies->memory().data(), copies->memory().size()),
      ours(0, marks.half()),
      served(marks.half(), marks.half()) {}

Staging::Staging(WorkerCore& worker)
    : worker_(worker), pinner_([&worker] { worker.wakeups.rouse_all(); }) {}

Staging::~Staging() {
  finish();
  for (const auto& from : borrowed_) {
    if (from->pin != nullptr) pinner_.let_go(std::move(from->pin), std::move(from->view.keep));
  }
}

Staging::Ring* Staging::ring_of(int device) const {
  for (const auto& ring : rings_) {
    if (ring->device == device) return ring.get();
  }
  return nullptr;
}

absl::Status Staging::add_ring(int device, std::unique_ptr<StagingRing> made) {
  auto ring = std::make_unique<Ring>(device, std::move(made));
  const absl::Span<std::byte> memory = ring->copies->memory();
  auto entry = worker_.regions.add(memory.data(), memory.size(), Access::kRemoteReadWrite,
                                   BackingFile{ring->copies->fd(), 0});
  if (!entry.ok()) return entry.status();
  const RegionEntry& row = **entry;
  ring->region = {row.base, row.size, row.index, row.generation, row.access, row.place};
  if (absl::Status status = worker_.add_region(**entry, {}); !status.ok()) {
    worker_.regions.remove(ring->region).IgnoreError();
    return status;
  }
  rings_.push_back(std::move(ring));
  return absl::OkStatus();
}

void Staging::note(int device, std::string why) {
  if (Ring* ring = ring_of(device); ring != nullptr) ring->why = std::move(why);
}

std::string Staging::explain(PeerId peer) const {
  std::string rings = absl::StrJoin(rings_, "; ", [](std::string* out, const auto& ring) {
    absl::StrAppend(out, "memory of CUDA device ", ring->device, ": staged through ",
                    ring->marks.room() >> 20,
                    " MiB of pinned memory where a rail does "
                    "not reach it",
                    ring->why.empty() ? "" : " (", ring->why, ring->why.empty() ? "" : ")");
    if (const std::string how = ring->copies->explain(); !how.empty()) {
      absl::StrAppend(out, ", where ", how);
    }
  });
  return rings + explain_lending(peer);
}

uint32_t Staging::next_generation() {
  if (++generation_ == 0) ++generation_;
  return generation_;
}

void Staging::say(PeerId peer, const Message& message) {
  unsaid_.push_back({peer, {}});
  message.encode(unsaid_.back().words);
  due_ = true;
}

bool Staging::may_start(PeerId peer) {
  const auto wires = wires_.find(peer.index);
  return wires_in_all_ < kMostWires && (wires == wires_.end() || wires->second < kMostWiresOfAPeer);
}

bool Staging::send_what_waits() {
  bool any = false;
  for (size_t i = 0; i < unsaid_.size();) {
    const PeerId peer = unsaid_[i].peer;
    const Peer* there = worker_.find_peer(peer);
    const bool gone = there == nullptr || there->state == PeerState::kDown;
    if (!gone && !start(peer, {}, {.counter = {there->uid, CounterTable::kStaging, 1}}, {},
                        unsaid_[i].words, nullptr)) {
      ++i;
      continue;
    }
    any = true;
    unsaid_.erase(unsaid_.begin() + static_cast<ptrdiff_t>(i));
  }
  for (size_t left = unwired_.size(); left > 0; --left) {
    const Handle name = unwired_.front();
    unwired_.pop_front();
    Chunk& chunk = *chunks_[name.index];
    if (chunk.name != name || !chunk.wired) continue;
    if (start_wire(chunk)) {
      any = true;
    } else {
      unwired_.push_back(name);
    }
  }
  return any;
}

// A transfer of the worker's own, in a slot that no caller can take. False: later.
bool Staging::start(PeerId peer, Handle chunk, TransferDescriptor transfer,
                    const MemoryRegion& local, std::string words, TransferId* started) {
  if (!may_start(peer)) return false;
  const absl::StatusOr<TransferId> id = worker_.slots.acquire_reserved();
  if (!id.ok()) return false;
  TransferSlot& slot = worker_.slots[id->slot];
  slot.notify_heap = std::move(words);
  transfer.id = *id;
  transfer.notify = slot.notify_heap;
  slot.fill_control(transfer, peer);
  slot.local = local;
  slot.on_end = wire_ended;
  slot.context = this;
  const uint32_t reserved = id->slot - worker_.slots.capacity();
  if (on_wire_.size() <= reserved) on_wire_.resize(reserved + 1);
  on_wire_[reserved] = {chunk, peer};
  ++wires_in_all_;
  ++wires_[peer.index];
  if (started != nullptr) *started = *id;
  worker_.transfers.activate(id->slot);
  return true;
}

void Staging::wire_ended(void* self, TransferId id, const absl::Status& status) {
  auto& staging = *static_cast<Staging*>(self);
  const auto [chunk, peer] = staging.on_wire_[id.slot - staging.worker_.slots.capacity()];
  --staging.wires_in_all_;
  --staging.wires_[peer.index];
  staging.due_ = true;
  if (chunk.generation != 0) staging.on_wire_end(chunk, status);
}

void Staging::copy(Ring& ring, CopyDirection direction, bool served, Handle name, bool urgent,
                   std::byte* host, const std::byte* base, const std::vector<Run>& runs) {
  copy_runs_.clear();
  for (const Run& run : runs) {
    copy_runs_.push_back({const_cast<std::byte*>(base) + run.offset, host, run.bytes});
    host += run.bytes;
    worker_.stats.staged_bytes += run.bytes;
  }
  ring.copies->copy(direction, cookie_of(name, served), urgent, copy_runs_);
}

void Staging::copy_ended(uint64_t cookie, absl::Status status) {
  const Handle name{static_cast<uint32_t>(cookie) >> 1, static_cast<uint32_t>(cookie >> 32)};
  due_ = true;
  if ((cookie & 1) != 0) {
    if (Served& served = *served_[name.index]; served.name == name) {
      on_served_copied(served, std::move(status));
    }
  } else if (Chunk& chunk = *chunks_[name.index]; chunk.name == name) {
    on_copied(chunk, std::move(status));
  }
}

void Staging::hear(Peer& peer, const Rail& rail, std::string_view words) {
  absl::StatusOr<Message> message = Message::decode(words);
  if (!message.ok()) {
    worker_.closing.close_later(peer.id(), &rail, message.status());
    return;
  }
  const auto waits = std::count_if(unsaid_.begin(), unsaid_.end(),
                                   [&](const Outgoing& each) { return each.peer == peer.id(); });
  if (waits >= kMostQueued) {
    worker_.closing.close_later(peer.id(), &rail,
                                absl::InvalidArgumentError("the peer asks for staged chunks but "
                                                           "does not read the answers"));
    return;
  }
  due_ = true;
  switch (message->kind) {
    case Message::Kind::kWant:
    case Message::Kind::kFetch:
      return on_request(peer.id(), *std::move(message));
    case Message::Kind::kLand:
      return on_land(peer.id(), *message);
    case Message::Kind::kRelease:
      return on_release(peer.id(), *message);
    case Message::Kind::kRoom:
      return on_room(find_chunk(message->chunk, peer.id()), peer.id(), *message);
    case Message::Kind::kRing:
      return on_ring(peer, *message);
    case Message::Kind::kBorrows:
      return on_borrows(peer.id(), *message);
    case Message::Kind::kOffer:
      return on_offer(peer.id(), *std::move(message));
    case Message::Kind::kEnded:
      break;
  }
  if (Chunk* chunk = find_chunk(message->chunk, peer.id()); chunk != nullptr) {
    on_ended(*chunk, std::move(message->status));
  }
}

// Its transfers are stopped by the worker; what we served it ends when its copies have.
void Staging::peer_down(PeerId peer) {
  for (const auto& served : served_) {
    if (served->name.generation == 0 || served->peer != peer) continue;
    if (served->state == Served::State::kCopying) {
      served->gone = true;
      served->room.ring->copies->drop(cookie_of(served->name, true));
    } else {
      withdraw(*served);
      close_served(*served);
    }
  }
  std::erase_if(unsaid_, [&](const Outgoing& words) { return words.peer == peer; });
  for (const auto& chunk : chunks_) {
    if (chunk->name.generation != 0 && chunk->peer == peer && chunk->parent.generation == 0) {
      retire(*chunk);
    }
  }
  std::vector<uint32_t> theirs;
  for (const auto& [index, op] : ops_) {
    if (op->peer == peer) theirs.push_back(index);
  }
  const Peer* there = worker_.find_peer(peer);
  for (const uint32_t index : theirs) {
    worker_.transfers.stop(
        index, TransferState::kFailed,
        there != nullptr ? there->why : absl::UnavailableError("the peer is gone"));
    // Nobody will say how what it has to copy ended.
    const auto op = ops_.find(index);
    if (op == ops_.end()) continue;
    const std::vector<uint32_t> open = op->second->chunks;
    for (const uint32_t each : open) wind_down(*chunks_[each]);
  }
  lent_peer_down(peer);
}

bool Staging::run_rings() {
  bool any = false;
  for (const auto& ring : rings_) {
    if (!ring->copies->busy()) continue;
    any |= ring->copies->progress(
        [this](uint64_t cookie, absl::Status status) { copy_ended(cookie, std::move(status)); });
  }
  return any;
}

bool Staging::progress() {
  bool any = run_rings();
  if (borrowing_) any |= tend_borrowed();
  if (!left_behind_.empty()) any |= take_back();
  const bool due = std::exchange(due_, false);
  if (!std::exchange(asking_, false) && !due) return any;
  if (due) urgent_.refused = bulk_.refused = 0;
  any |= give_room();
  any |= feed();
  any |= send_what_waits();
  return any;
}

bool Staging::busy() const {
  return due_ || asking_ ||
         std::any_of(rings_.begin(), rings_.end(),
                     [](const auto& ring) { return ring->copies->busy(); }) ||
         (awake_until_ != kNever && worker_.clock.now() < awake_until_);
}

void Staging::finish() {
  while (std::any_of(rings_.begin(), rings_.end(),
                     [](const auto& ring) { return ring->copies->busy(); })) {
    run_rings();
  }
}

}  // namespace baton::internal
