// Chunks that peers write to, and read from, memory of our devices.
#include <algorithm>

#include "transport/internal/worker/staging.h"

namespace baton::internal {

Staging::Served* Staging::find_served(Handle name, PeerId peer) {
  if (name.generation == 0 || name.index >= served_.size()) return nullptr;
  Served& served = *served_[name.index];
  return served.name == name && served.peer == peer ? &served : nullptr;
}

// The region's first byte, if the peer may do this with all of the runs.
absl::StatusOr<std::byte*> Staging::base_of(const RemoteRegion& region, bool write, size_t bytes,
                                            const std::vector<Run>& runs) {
  const Access want = write ? Access::kRemoteWrite : Access::kRemoteRead;
  const auto check = [&](uint64_t offset, uint64_t length) {
    return worker_.regions.resolve(region.index, region.generation, region.key, want, offset,
                                   length, RegionTable::By::kDevice);
  };
  absl::StatusOr<std::byte*> base = check(0, std::min<size_t>(bytes, 1));
  for (const Run& run : runs) {
    if (!base.ok()) break;
    if (const absl::Status status = check(run.offset, run.bytes).status(); !status.ok()) {
      return status;
    }
  }
  if (base.ok() && ring_of(worker_.regions.entries()[region.index].place.device) == nullptr) {
    return absl::FailedPreconditionError("the remote region is not staged by its owner");
  }
  return base;
}

// A free row, with what the message says.
Staging::Served& Staging::open_served(PeerId peer, Message message) {
  if (free_served_.empty()) {
    free_served_.push_back(static_cast<uint32_t>(served_.size()));
    served_.push_back(std::make_unique<Served>());
    served_.back()->name.index = free_served_.back();
  }
  Served& served = *served_[free_served_.back()];
  free_served_.pop_back();
  served.name.generation = next_generation();
  served.peer = peer;
  served.chunk = message.chunk;
  served.region = message.region;
  served.bytes = message.bytes;
  served.urgent = message.urgent && message.bytes <= kUrgentBytes;
  served.write = message.kind != Message::Kind::kFetch;
  served.state = Served::State::kWaiting;
  served.gone = served.lent = false;
  served.room = {};
  served.in_place = {};
  served.runs = std::move(message.runs);
  ++serves_[peer.index];
  return served;
}

void Staging::on_request(PeerId peer, Message message) {
  const bool write = message.kind == Message::Kind::kWant;
  if (serves_[peer.index] >= kMostServed) {
    Served refused{.peer = peer, .chunk = message.chunk};
    return answer(refused, absl::ResourceExhaustedError("too many staged chunks at a time"));
  }
  const absl::StatusOr<std::byte*> base =
      base_of(message.region, write, message.bytes, message.runs);
  if (!base.ok()) {
    Served refused{.peer = peer, .chunk = message.chunk};
    return answer(refused, base.status());
  }
  const Served& served = open_served(peer, std::move(message));
  (served.urgent ? want_urgent_ : want_bulk_).push_back(served.name);
}

bool Staging::give_room() {
  const bool any = give_room(want_urgent_);
  return give_room(want_bulk_) || any;
}

// In their order; but those of a peer that has room already may be passed by.
bool Staging::give_room(std::deque<Handle>& list) {
  bool any = false;
  PeerId passed;
  for (size_t i = 0; i < list.size();) {
    const Handle name = list[i];
    Served& served = *served_[name.index];
    const bool gone = served.name != name;
    if (!gone && served.peer == passed) {
      ++i;
      continue;
    }
    if (!gone && !begin_serving(served)) {
      const Ring& ring = *ring_of(worker_.regions.entries()[served.region.index].place.device);
      if (!ring.served.has_any(served.peer.index)) return any;
      passed = served.peer;
      continue;
    }
    list.erase(list.begin() + static_cast<ptrdiff_t>(i));
    any = true;
  }
  return any;
}

// False: there is no room for it now.
bool Staging::begin_serving(Served& served) {
  const absl::StatusOr<std::byte*> base =
      base_of(served.region, served.write, served.bytes, served.runs);
  if (!base.ok()) {
    answer(served, base.status());
    close_served(served);
    return true;
  }
  Ring& ring = *ring_of(worker_.regions.entries()[served.region.index].place.device);
  const std::optional<size_t> offset =
      ring.served.take(served.bytes, served.urgent, served.peer.index);
  if (!offset) return false;
  served.room = {&ring, *offset, served.bytes};
  if (served.write) {
    served.state = Served::State::kRoom;
    answer(served, absl::OkStatus());
  } else {
    served.state = Served::State::kCopying;
    copy(ring, CopyDirection::kToHost, true, served.name, served.urgent,
         ring.marks.ring() + *offset, *base, served.runs);
  }
  return true;
}

void Staging::on_land(PeerId peer, const Message& message) {
  Served* served = find_served(message.room, peer);
  if (served == nullptr || !served->write || served->state != Served::State::kRoom) return;
  absl::StatusOr<std::byte*> base = base_of(served->region, true, served->bytes, message.runs);
  if (base.ok() && message.bytes > served->bytes) {
    base = absl::InvalidArgumentError("more bytes than the staging space holds");
  }
  if (!base.ok()) {
    served->state = Served::State::kWaiting;
    answer(*served, base.status());
    return close_served(*served);
  }
  served->state = Served::State::kCopying;
  Ring& ring = *served->room.ring;
  copy(ring, CopyDirection::kToDevice, true, served->name, served->urgent,
       ring.marks.ring() + served->room.offset, *base, message.runs);
}

void Staging::on_served_copied(Served& served, absl::Status status) {
  if (absl::IsCancelled(status) && !served.gone) {
    status = base_of(served.region, served.write, served.bytes, {}).status();
  }
  if (served.write || served.gone || !status.ok()) {
    if (served.write || !served.gone) {
      served.state = Served::State::kWaiting;  // so that the answer is its end
      answer(served, std::move(status));
    }
    return close_served(served);
  }
  served.state = Served::State::kRoom;
  const Peer* peer = worker_.find_peer(served.peer);
  served.lent = peer != nullptr && shows_rings(*peer);
  if (served.lent) served.room.ring->marks.lend(served.room.offset, served.name.generation);
  answer(served, absl::OkStatus());
}

void Staging::on_release(PeerId peer, const Message& message) {
  Served* served = find_served(message.room, peer);
  if (served == nullptr) {
    Served unknown{.peer = peer, .chunk = message.chunk};
    return answer(unknown, absl::OkStatus());
  }
  if (served->state == Served::State::kCopying) {  // answered at its end
    served->gone = true;
    served->room.ring->copies->drop(cookie_of(served->name, true));
    return;
  }
  withdraw(*served);
  if (served->write) {
    served->state = Served::State::kWaiting;
    answer(*served, absl::OkStatus());
  }
  close_served(*served);
}

// Waits for room no more.
void Staging::withdraw(const Served& served) {
  if (served.state != Served::State::kWaiting) return;
  std::erase(served.urgent ? want_urgent_ : want_bulk_, served.name);
}

// Of one that has room, where that is; else how it ended.
void Staging::answer(const Served& served, absl::Status status) {
  Message message{.kind = Message::Kind::kEnded, .chunk = served.chunk};
  if (served.state == Served::State::kRoom) {
    message.kind = Message::Kind::kRoom;
    message.room = served.name;
    message.region =
        worker_.regions.describe(worker_.regions.entries()[served.room.ring->region.index]);
    message.offset = served.room.offset;
    message.bytes = served.bytes;
  } else {
    message.status = std::move(status);
  }
  say(served.peer, message);
}

void Staging::close_served(Served& served) {
  if (served.in_place.from != nullptr) {
    give_back(served.in_place);
  } else if (served.room.ring != nullptr) {
    give_back(served.room, served.room.ring->served, served.lent);
  }
  --serves_[served.peer.index];
  free_served_.push_back(served.name.index);
  served.name.generation = 0;
  served.runs.clear();
  due_ = true;
}

void Staging::forget(const RegionEntry& region) {
  const auto uses = [&](const std::unique_ptr<Served>& served) {
    return served->name.generation != 0 && served->region.index == region.index &&
           served->region.generation == region.generation &&
           served->state == Served::State::kCopying;
  };
  for (const auto& served : served_) {
    if (!uses(served)) continue;
    served->room.ring->copies->drop(cookie_of(served->name, true));
  }
  while (std::any_of(served_.begin(), served_.end(), uses)) run_rings();
}

}  // namespace baton::internal
