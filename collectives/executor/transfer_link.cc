// Messages over a TransferLink: slots at the receiver, their counters, the transfers that fill
// them.
#include "collectives/executor/transfer_link.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "transport/base/wire.h"

namespace baton::collectives::executor {

absl::StatusOr<std::unique_ptr<TransferLink>> TransferLink::create(Worker& worker, Memory& memory,
                                                                   PeerId peer, size_t most,
                                                                   uint64_t group, uint32_t ranks,
                                                                   bool further) {
  constexpr size_t kPage = 4096;
  const size_t fair = kSlotBudget / (std::max(2u, ranks) - 1) / kSlots / kLanes / kPage * kPage;
  const size_t slot_bytes = std::min(
      {(most + 1) / 2, further ? kFurtherSlotBytes : kMostSlotBytes, std::max(kPage, fair)});
  std::unique_ptr<TransferLink> link(new TransferLink(worker, memory, peer, slot_bytes, group));
  for (CounterId& room : link->room_) {
    absl::StatusOr<CounterId> counter = worker.allocate_counter();
    if (!counter.ok()) return counter.status();
    room = *counter;
  }
  for (auto& lane : link->outgoing_) {
    for (Outgoing& outgoing : lane) outgoing.link = link.get();
  }
  for (Write& write : link->writes_) write.link = link.get();
  return link;
}

absl::Status TransferLink::make_slots() {
  absl::StatusOr<Block> slots = memory_.stage(slot_bytes_ * kSlots * kLanes);
  if (!slots.ok()) return slots.status();
  slots_ = *slots;
  for (auto& lane : arrived_) {
    for (CounterId& arrived : lane) {
      absl::StatusOr<CounterId> counter = worker_.allocate_counter();
      if (!counter.ok()) return counter.status();
      arrived = *counter;
    }
  }
  return absl::OkStatus();
}

// Says where our slots are; again later, if there is no room for that now.
void TransferLink::answer() {
  answer_due_ = false;
  absl::Status status = slots_.data == nullptr ? make_slots() : absl::OkStatus();
  const absl::StatusOr<RemoteRegion> region =
      status.ok() ? worker_.remote_region(slots_.region) : status;
  if (!region.ok()) return fail(region.status());
  Slots ours;
  ours.region = *region;
  ours.offset = slots_.offset;
  ours.slot_bytes = slot_bytes_;
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    for (uint32_t slot = 0; slot < kSlots; ++slot) {
      ours.arrived[lane][slot] = worker_.remote_counter(arrived_[lane][slot]);
    }
  }
  const std::string text = ours.encode();
  Packet packet;
  packet.kind = Packet::Kind::kSlots;
  answer_due_ = !tell(packet, {reinterpret_cast<const std::byte*>(text.data()), text.size()});
}

TransferLink::~TransferLink() {
  cancel();  // transfers still on their way would tell a link that is gone
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    for (CounterId counter : arrived_[lane]) {
      if (counter.generation != 0) worker_.free_counter(counter).IgnoreError();
    }
    if (room_[lane].generation != 0) worker_.free_counter(room_[lane]).IgnoreError();
    for (Outgoing& outgoing : outgoing_[lane]) unstage(outgoing.staging);
    for (Granted& granted : granted_[lane]) unstage(granted.staging);
  }
  if (slots_.data != nullptr) memory_.free(slots_);
}

void TransferLink::begin_cancel() {
  memory_.revoke_grants(group_).IgnoreError();
  if (!unsettled()) return;
  for (auto& lane : outgoing_) {
    for (Outgoing& outgoing : lane) {
      if (!outgoing.copied) worker_.cancel(outgoing.id).IgnoreError();
    }
  }
  for (Write& write : writes_) worker_.cancel(write.id).IgnoreError();
}

TransferId TransferLink::held() const {
  if (!unsettled()) return {};
  const auto holds = [this](TransferId id) {
    const absl::StatusOr<bool> free = worker_.local_free(id);
    return free.ok() && !*free;
  };
  for (const auto& lane : outgoing_) {
    for (const Outgoing& outgoing : lane) {
      const bool ours = outgoing.copied || outgoing.staging.data != nullptr;
      if (ours || outgoing.done.load(std::memory_order_acquire) == outgoing.number) continue;
      if (holds(outgoing.id)) return outgoing.id;
    }
  }
  for (const Write& write : writes_) {
    if (write.under_way.load(std::memory_order_acquire) && holds(write.id)) return write.id;
  }
  return {};
}

void TransferLink::withdraw() {
  for (size_t i = 0; i < kLanes * kSlots + kWrites && !sources_free(); ++i) {
    worker_.withdraw(held()).IgnoreError();
  }
}

void TransferLink::cancel() {
  auto over = [&] { return !unsettled(); };
  begin_cancel();
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

TransferLink::Offer TransferLink::offer() const {
  Offer offer;
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    offer.room[lane] = worker_.remote_counter(room_[lane]);
  }
  return offer;
}

// Chooses the memory that the transfer reads. A small message is copied, so that its call may end
// before the message has arrived.
bool TransferLink::choose_source(uint32_t lane, uint64_t number, const Segments& source,
                                 const TheirPlace* place, TransferRequest& request) {
  Outgoing& outgoing = outgoing_[lane][number % kSlots];
  // Bytes behind the data in scratch are undefined, and may not fit.
  const size_t length =
      std::min<size_t>(source.total(), place != nullptr ? place->bytes : their_slots_->slot_bytes);
  outgoing.copied = length <= kEagerBytes;
  if (length == 0) return true;
  const Memory::Region* region = outgoing.copied ? nullptr : memory_.find(source);
  if (region != nullptr && source.contiguous()) {
    request.local = region->local;
    request.local_layout =
        Layout::contiguous(static_cast<size_t>(source.data - region->local.base), length);
  } else {
    // Strided data is packed here: the wire carries long runs only.
    Block& staging = outgoing.staging;
    if (staging.data == nullptr && !stage(staging, length).ok()) return false;
    copy({staging.data, length, 1, 0}, source);
    request.local = staging.region;
    request.local_layout = Layout::contiguous(staging.offset, length);
  }
  request.remote = place != nullptr ? place->region : their_slots_->region;
  request.remote_layout = Layout::contiguous(
      place != nullptr ? place->offset
                       : their_slots_->offset + slot_offset(lane, number, their_slots_->slot_bytes),
      length);
  return true;
}

std::string_view TransferLink::announce(uint32_t lane, const CallTag& tag, absl::Span<char> text) {
  const Announcement ours{*tag.call, lane, static_cast<uint32_t>(taken_[lane] - given_back_[lane])};
  std::memcpy(text.data(), &group_, sizeof group_);
  text[sizeof group_] = 'c';
  std::memcpy(text.data() + sizeof group_ + 1, &ours, sizeof ours);
  return {text.data(), text.size()};
}

bool TransferLink::is_announced(uint32_t lane, uint64_t call) const {
  return announced_call_[lane] == call ||
         std::find(announced_call_.begin(), announced_call_.end(), call) != announced_call_.end();
}

uint64_t TransferLink::send(uint32_t lane, const Segments& source, const CallTag& tag) {
  if (!their_slots_) {
    if (!asked_) asked_ = tell({.kind = Packet::Kind::kAsk}, {});
    return 0;
  }
  const uint64_t number = sent_[lane] + 1;
  Outgoing& outgoing = outgoing_[lane][number % kSlots];
  char text[sizeof group_ + 1 + sizeof(Announcement)];
  const bool first = !is_announced(lane, tag.call->sequence);
  const TheirPlace* place = nullptr;
  if (tag.most > their_slots_->slot_bytes) {
    place = &their_places_[lane][number % kSlots];
    if (place->number != number) {
      // Not with the message: a peer that has called something else may never grant it.
      if (first && worker_.notify_detached(peer_, announce(lane, tag, text)).ok()) {
        submitted_ = true;
        announced_call_[lane] = tag.call->sequence;
        given_back_[lane] = taken_[lane];
      }
      return 0;
    }
  } else if (number > kSlots && room(lane) + kSlots < number) {
    give_back(lane);
    return 0;
  }
  // The transfer that used this counter before has ended.
  if (outgoing.done.load(std::memory_order_acquire) != outgoing.number) return 0;
  for (Outgoing& each : outgoing_[lane]) {
    if (each.done.load(std::memory_order_acquire) == each.number) unstage(each.staging);
  }

  TransferRequest request;
  request.op = Op::kWrite;
  request.peer = peer_;
  if (!choose_source(lane, number, source, place, request)) return 0;
  request.counter = their_slots_->arrived[lane][number % kSlots];
  if (first) request.notify = announce(lane, tag, text);
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
    if (!absl::IsResourceExhausted(id.status())) fail(id.status());
    return 0;
  }
  outgoing.id = *id;
  submitted_ = true;
  if (first) {
    announced_call_[lane] = tag.call->sequence;
    given_back_[lane] = taken_[lane];
  }
  sent_[lane] = number;
  return number;
}

void TransferLink::announced(const Announcement& theirs) {
  if (theirs.lane >= kLanes) return;
  announced_room_[theirs.lane] += theirs.given_back;
}

void TransferLink::on_end(void* context, TransferId, const absl::Status& status) {
  auto& outgoing = *static_cast<Outgoing*>(context);
  TransferLink& link = *outgoing.link;
  if (status.ok()) {
    outgoing.done.store(outgoing.number, std::memory_order_release);
  } else {
    link.fail(status);
  }
  link.open_.fetch_sub(1, std::memory_order_release);
}

void TransferLink::fail(const absl::Status& why) {
  std::lock_guard lock(mutex_);
  if (failure_.ok()) failure_ = why;
}

bool TransferLink::delivered(uint32_t lane, uint64_t number) {
  Outgoing& outgoing = outgoing_[lane][number % kSlots];
  // A later message has taken this one's slot only after this one had arrived.
  const bool ours_again =
      outgoing.number > number || (outgoing.number == number && outgoing.copied);
  if (ours_again) return true;
  if (outgoing.done.load(std::memory_order_acquire) < number) return false;
  unstage(outgoing.staging);
  return true;
}

absl::Status TransferLink::stage(Block& staging, size_t bytes) {
  absl::StatusOr<Block> block = memory_.stage(bytes);
  if (!block.ok()) return block.status();
  staging = *block;
  staged_bytes_ += staging.size;
  return absl::OkStatus();
}

void TransferLink::unstage(Block& staging) {
  if (staging.data == nullptr) return;
  staged_bytes_ -= staging.size;
  memory_.free(std::exchange(staging, Block{}));
}

bool TransferLink::peek(uint32_t lane, size_t expected, const CallTag&, Segments& message,
                        absl::Status& error) {
  if (answer_due_) answer();
  if (!untold_.empty()) tell_grants();
  const uint64_t number = taken_[lane] + 1;
  const Granted& granted = granted_[lane][number % kSlots];
  const bool is_granted = granted.number == number;
  if (!is_granted) give_back(lane);
  // How often this counter has been raised once the message is there; numbers start at 1.
  const uint64_t fills = (number + kSlots - 1) / kSlots;
  if (worker_.counter_value(arrived_[lane][number % kSlots]) < fills) return false;
  if (expected > (is_granted ? granted.bytes : slot_bytes_)) {
    error = absl::InternalError("a message is longer than its place");
    return false;
  }
  message = {is_granted ? granted.data : slots_.data + slot_offset(lane, number, slot_bytes_),
             expected, 1, 0};
  return true;
}

bool TransferLink::consume(uint32_t lane) {
  const uint64_t number = ++taken_[lane];
  Granted& granted = granted_[lane][number % kSlots];
  if (granted.number != number) {
    give_back(lane);
  } else {
    if (granted.staging.data == nullptr) in_place_bytes_ += granted.bytes;
    unstage(granted.staging);
  }
  return true;
}

void TransferLink::give_back(uint32_t lane) {
  const uint64_t taken = taken_[lane];
  if (taken - given_back_[lane] < 2) return;
  TransferRequest request;
  request.op = Op::kWrite;
  request.peer = peer_;
  request.counter = theirs_.room[lane];
  request.increment = taken - given_back_[lane];
  request.detached = true;
  absl::StatusOr<TransferId> id = worker_.submit(request);
  if (id.ok()) {
    submitted_ = true;
    given_back_[lane] = taken;
  }
}

std::string TransferLink::route() const { return worker_.explain(peer_); }

absl::Status TransferLink::status() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

namespace {

// The counter that `bytes` begin with, which are shorter by it afterwards.
absl::Status take_counter(std::string_view& bytes, RemoteCounter& out) {
  const auto counter = RemoteCounter::decode(bytes.substr(0, RemoteCounter::kEncodedBytes));
  if (!counter.ok()) return counter.status();
  out = *counter;
  bytes.remove_prefix(RemoteCounter::kEncodedBytes);
  return absl::OkStatus();
}

}  // namespace

std::string TransferLink::Offer::encode() const {
  std::string out;
  for (const RemoteCounter& counter : room) out += counter.encode();
  return out;
}

absl::StatusOr<TransferLink::Offer> TransferLink::Offer::decode(std::string_view bytes) {
  if (bytes.size() != kLanes * RemoteCounter::kEncodedBytes) {
    return absl::InvalidArgumentError("a link offer has the wrong length");
  }
  Offer offer;
  for (RemoteCounter& room : offer.room) {
    if (absl::Status status = take_counter(bytes, room); !status.ok()) return status;
  }
  return offer;
}

std::string TransferLink::Slots::encode() const {
  std::string out = region.encode();
  for (const auto& lane : arrived) {
    for (const RemoteCounter& counter : lane) out += counter.encode();
  }
  out.append(reinterpret_cast<const char*>(&offset), sizeof offset);
  out.append(reinterpret_cast<const char*>(&slot_bytes), sizeof slot_bytes);
  return out;
}

absl::StatusOr<TransferLink::Slots> TransferLink::Slots::decode(std::string_view bytes) {
  constexpr size_t kCounters = kLanes * kSlots;
  if (bytes.size() != RemoteRegion::kEncodedBytes + kCounters * RemoteCounter::kEncodedBytes + 16) {
    return absl::InvalidArgumentError("a link's slots have the wrong length");
  }
  Slots slots;
  absl::StatusOr<RemoteRegion> region =
      RemoteRegion::decode(bytes.substr(0, RemoteRegion::kEncodedBytes));
  if (!region.ok()) return region.status();
  slots.region = *region;
  bytes.remove_prefix(RemoteRegion::kEncodedBytes);
  for (uint32_t i = 0; i < kCounters; ++i) {
    absl::Status status = take_counter(bytes, slots.arrived[i / kSlots][i % kSlots]);
    if (!status.ok()) return status;
  }
  std::memcpy(&slots.offset, bytes.data(), 8);
  std::memcpy(&slots.slot_bytes, bytes.data() + 8, 8);
  if (slots.slot_bytes == 0 || slots.offset > slots.region.size ||
      slots.slot_bytes > (slots.region.size - slots.offset) / kCounters) {
    return absl::InvalidArgumentError("a link's slots lie outside their region");
  }
  return slots;
}

}  // namespace baton::collectives::executor
