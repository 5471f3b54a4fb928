// Sending over a TransferLink: slots at the receiver, their counters, the transfers that fill them.
#include "collectives/executor/transfer_link.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "transport/base/wire.h"

namespace baton::collectives::executor {

absl::StatusOr<std::unique_ptr<TransferLink>> TransferLink::create(Worker& worker, Memory& memory,
                                                                   PeerId peer, size_t slot_bytes,
                                                                   uint64_t group) {
  std::unique_ptr<TransferLink> link(new TransferLink(worker, memory, peer, slot_bytes, group));
  absl::StatusOr<Block> slots = memory.allocate(slot_bytes * kSlots * kAllLanes);
  if (!slots.ok()) return slots.status();
  link->slots_ = *slots;
  absl::StatusOr<Block> eager = memory.allocate(kEagerBytes * kSlots * kAllLanes);
  if (!eager.ok()) return eager.status();
  link->eager_ = *eager;
  for (uint32_t lane = 0; lane < kAllLanes; ++lane) {
    for (uint32_t slot = 0; slot <= kSlots; ++slot) {
      absl::StatusOr<CounterId> counter = worker.allocate_counter();
      if (!counter.ok()) return counter.status();
      (slot < kSlots ? link->arrived_[lane][slot] : link->room_[lane]) = *counter;
    }
    for (uint32_t slot = 0; slot < kSlots; ++slot) {
      Outgoing& outgoing = link->outgoing_[lane][slot];
      outgoing.link = link.get();
      const size_t at = (lane * kSlots + slot) * kEagerBytes;
      outgoing.eager = {eager->data + at, kEagerBytes, eager->region, eager->offset + at};
    }
  }
  return link;
}

TransferLink::~TransferLink() {
  cancel();  // transfers still on their way would tell a link that is gone
  for (uint32_t lane = 0; lane < kAllLanes; ++lane) {
    for (CounterId counter : arrived_[lane]) {
      if (counter.generation != 0) worker_.free_counter(counter).IgnoreError();
    }
    if (room_[lane].generation != 0) worker_.free_counter(room_[lane]).IgnoreError();
    for (Outgoing& outgoing : outgoing_[lane]) {
      if (outgoing.staging.data != nullptr) memory_.free(outgoing.staging);
    }
  }
  if (slots_.data != nullptr) memory_.free(slots_);
  if (eager_.data != nullptr) memory_.free(eager_);
}

void TransferLink::begin_cancel() {
  if (!unsettled()) return;
  for (auto& lane : outgoing_) {
    for (Outgoing& outgoing : lane) {
      if (!outgoing.copied) worker_.cancel(outgoing.id).IgnoreError();
    }
  }
}

bool TransferLink::sources_free() const {
  if (!unsettled()) return true;
  for (const auto& lane : outgoing_) {
    for (const Outgoing& outgoing : lane) {
      if (outgoing.copied || outgoing.done.load(std::memory_order_acquire) == outgoing.number) {
        continue;
      }
      const absl::StatusOr<bool> free = worker_.local_free(outgoing.id);
      if (free.ok() && !*free) return false;
    }
  }
  return true;
}

void TransferLink::cancel() {
  auto over = [&] { return !unsettled(); };
  if (over()) return;
  for (auto& lane : outgoing_) {
    for (Outgoing& outgoing : lane) worker_.cancel(outgoing.id).IgnoreError();
  }
  if (worker_.wait_until(over, std::chrono::milliseconds(100)).ok()) return;
  // The wire does not let go of them: the connection must. Without a fence: of our memory nothing
  // is read any more when the transfers have ended, and what lands at the peer after that lands in
  // slots of its communicator's, which it fences itself before it gives the memory back.
  worker_.disconnect(peer_, Time::zero()).IgnoreError();
  worker_.wait_until(over).IgnoreError();  // at once; of a device, when its copy ends
}

absl::StatusOr<TransferLink::Offer> TransferLink::offer() const {
  absl::StatusOr<RemoteRegion> region = worker_.remote_region(slots_.region);
  if (!region.ok()) return region.status();
  Offer offer;
  offer.slots = *region;
  offer.offset = slots_.offset;
  offer.slot_bytes = slot_bytes_;
  for (uint32_t lane = 0; lane < kAllLanes; ++lane) {
    for (uint32_t slot = 0; slot < kSlots; ++slot) {
      offer.arrived[lane][slot] = worker_.remote_counter(arrived_[lane][slot]);
    }
    offer.room[lane] = worker_.remote_counter(room_[lane]);
  }
  return offer;
}

// Where the wire takes the bytes from. A small message is copied, so that its call may end before
// it has arrived.
bool TransferLink::choose_source(uint32_t lane, uint64_t number, const Segments& source,
                                 TransferRequest& request) {
  Outgoing& outgoing = outgoing_[lane][number % kSlots];
  const size_t length = source.total();
  outgoing.copied = length <= kEagerBytes;
  if (length == 0) return true;
  const Memory::Region* region = outgoing.copied ? nullptr : memory_.find(source);
  if (region != nullptr && source.contiguous()) {
    request.local = region->local;
    request.local_layout =
        Layout::contiguous(static_cast<size_t>(source.data - region->local.base), length);
  } else {
    // Strided data is packed here: the wire carries long runs only.
    Block& staging = outgoing.copied ? outgoing.eager : outgoing.staging;
    if (staging.data == nullptr) {
      absl::StatusOr<Block> made = memory_.allocate(slot_bytes_);
      if (!made.ok()) return false;
      staging = *made;
    }
    copy({staging.data, length, 1, 0}, source);
    request.local = staging.region;
    request.local_layout = Layout::contiguous(staging.offset, length);
  }
  request.remote = theirs_.slots;
  request.remote_layout = Layout::contiguous(theirs_.offset + slot_offset(lane, number), length);
  return true;
}

uint64_t TransferLink::send(uint32_t lane, const Segments& source, const CallTag& tag) {
  const uint64_t number = sent_[lane] + 1;
  Outgoing& outgoing = outgoing_[lane][number % kSlots];
  // Room at the receiver, and the transfer that used this slot before has ended.
  if (number > kSlots && room(lane) + kSlots < number) return 0;
  if (outgoing.done.load(std::memory_order_acquire) != outgoing.number) return 0;

  TransferRequest request;
  request.op = Op::kWrite;
  request.peer = peer_;
  if (!choose_source(lane, number, source, request)) return 0;
  request.counter = theirs_.arrived[lane][number % kSlots];
  char text[sizeof group_ + 1 + sizeof(Announcement)];
  uint64_t& announced = announced_[lane == kPointToPointLane ? 1 : 0];
  const bool first = announced != tag.call->sequence;
  if (first) {
    const Announcement ours{*tag.call, lane,
                            static_cast<uint32_t>(taken_[lane] - given_back_[lane])};
    std::memcpy(text, &group_, sizeof group_);
    text[sizeof group_] = 'c';
    std::memcpy(text + sizeof group_ + 1, &ours, sizeof ours);
    request.notify = std::string_view(text, sizeof text);
  }
  request.on_end = &TransferLink::on_end;
  request.context = &outgoing;
  request.detached = true;
  const uint64_t before = outgoing.number;
  outgoing.number = number;
  open_.fetch_add(1, std::memory_order_relaxed);
  absl::StatusOr<TransferId> id = worker_.submit(request);
  if (!id.ok()) {
    open_.fetch_sub(1, std::memory_order_relaxed);
    outgoing.number = before;
    if (!absl::IsResourceExhausted(id.status())) {
      std::lock_guard lock(mutex_);
      if (failure_.ok()) failure_ = id.status();
    }
    return 0;
  }
  outgoing.id = *id;
  submitted_ = true;
  announced = tag.call->sequence;
  if (first) given_back_[lane] = taken_[lane];
  sent_[lane] = number;
  return number;
}

void TransferLink::announced(const Announcement& theirs) {
  if (theirs.lane >= kAllLanes) return;
  announced_room_[theirs.lane] += theirs.given_back;
  if (theirs.lane == kPointToPointLane) {
    peer_calls_[theirs.call.sequence % kCallsAhead] = theirs.call;
  }
}

void TransferLink::on_end(void* context, TransferId, const absl::Status& status) {
  auto& outgoing = *static_cast<Outgoing*>(context);
  TransferLink& link = *outgoing.link;
  if (status.ok()) {
    outgoing.done.store(outgoing.number, std::memory_order_release);
  } else {
    std::lock_guard lock(link.mutex_);
    if (link.failure_.ok()) link.failure_ = status;
  }
  link.open_.fetch_sub(1, std::memory_order_release);
}

bool TransferLink::delivered(uint32_t lane, uint64_t number) {
  const Outgoing& outgoing = outgoing_[lane][number % kSlots];
  // A later message has taken this one's slot only after this one had arrived.
  const bool ours_again =
      outgoing.number > number || (outgoing.number == number && outgoing.copied);
  if (!ours_again && outgoing.done.load(std::memory_order_acquire) < number) return false;
  return lane != kPointToPointLane || room(lane) >= number;
}

bool TransferLink::peek(uint32_t lane, size_t expected, const CallTag& tag, Segments& message,
                        absl::Status& error) {
  const uint64_t number = taken_[lane] + 1;
  // How often this slot has been filled once the message is there; numbers start at 1.
  const uint64_t fills = (number + kSlots - 1) / kSlots;
  if (worker_.counter_value(arrived_[lane][number % kSlots]) < fills) return false;
  if (lane == kPointToPointLane) {
    const CallDescriptor& theirs = peer_calls_[tag.call->sequence % kCallsAhead];
    if (theirs.sequence != tag.call->sequence) return false;  // still on its way
    if (theirs != *tag.call) {
      error = absl::FailedPreconditionError(
          absl::StrCat("the peer called ", theirs.to_string(),
                       ": both ends must name the same count and type, in the same kind of call"));
      return false;
    }
  }
  if (expected > slot_bytes_) {
    error = absl::InternalError("a message is longer than a slot");
    return false;
  }
  message = {slots_.data + slot_offset(lane, number), expected, 1, 0};
  return true;
}

bool TransferLink::consume(uint32_t lane) {
  const uint64_t taken = taken_[lane] + 1;
  const bool sender_waits = lane == kPointToPointLane;
  if (!sender_waits && taken - given_back_[lane] < 2) {
    taken_[lane] = taken;
    return true;
  }
  TransferRequest request;
  request.op = Op::kWrite;
  request.peer = peer_;
  request.counter = theirs_.room[lane];
  request.increment = taken - given_back_[lane];
  request.detached = true;
  absl::StatusOr<TransferId> id = worker_.submit(request);
  if (!id.ok() && sender_waits) return false;
  taken_[lane] = taken;
  if (id.ok()) {
    submitted_ = true;
    given_back_[lane] = taken;  // else with the next one
  }
  return true;
}

std::string TransferLink::route() const { return worker_.explain(peer_); }

absl::Status TransferLink::status() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

std::string TransferLink::Offer::encode() const {
  std::string out = slots.encode();
  for (const auto& lane : arrived) {
    for (const RemoteCounter& counter : lane) out += counter.encode();
  }
  for (const RemoteCounter& counter : room) out += counter.encode();
  out.append(reinterpret_cast<const char*>(&offset), sizeof offset);
  out.append(reinterpret_cast<const char*>(&slot_bytes), sizeof slot_bytes);
  return out;
}

absl::StatusOr<TransferLink::Offer> TransferLink::Offer::decode(std::string_view bytes) {
  constexpr size_t kCounters = kAllLanes * (kSlots + 1);
  if (bytes.size() != RemoteRegion::kEncodedBytes + kCounters * RemoteCounter::kEncodedBytes + 16) {
    return absl::InvalidArgumentError("a link offer has the wrong length");
  }
  Offer offer;
  absl::StatusOr<RemoteRegion> slots =
      RemoteRegion::decode(bytes.substr(0, RemoteRegion::kEncodedBytes));
  if (!slots.ok()) return slots.status();
  offer.slots = *slots;
  bytes.remove_prefix(RemoteRegion::kEncodedBytes);
  for (uint32_t i = 0; i < kCounters; ++i) {
    absl::StatusOr<RemoteCounter> counter =
        RemoteCounter::decode(bytes.substr(0, RemoteCounter::kEncodedBytes));
    if (!counter.ok()) return counter.status();
    if (i < kAllLanes * kSlots) {
      offer.arrived[i / kSlots][i % kSlots] = *counter;
    } else {
      offer.room[i - kAllLanes * kSlots] = *counter;
    }
    bytes.remove_prefix(RemoteCounter::kEncodedBytes);
  }
  std::memcpy(&offer.offset, bytes.data(), 8);
  std::memcpy(&offer.slot_bytes, bytes.data() + 8, 8);
  if (offer.offset > offer.slots.size ||
      offer.slot_bytes > (offer.slots.size - offer.offset) / (kSlots * kAllLanes)) {
    return absl::InvalidArgumentError("a link offer names slots outside its region");
  }
  return offer;
}

}  // namespace baton::collectives::executor
