// Sending over a DirectLink by writing our own outbox, and receiving by reading the peer's.
#include "collectives/executor/direct_link.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_format.h"
#include "transport/base/prefetch.h"

namespace baton::collectives::executor {

DirectLink::DirectLink(Ends ends)
    : ends_(std::move(ends)),
      theirs_(*reinterpret_cast<const ControlBlock*>(ends_.peer_control.data)),
      their_regions_(*reinterpret_cast<const RegionTable*>(ends_.peer_regions.data)),
      out_(ends_.out),
      in_(*reinterpret_cast<const Outbox*>(ends_.peer_out.data)) {}

DirectLink::~DirectLink() {
  for (auto& lane : staging_) {
    for (Block& block : lane) {
      if (block.data != nullptr) ends_.memory.free(block);
    }
  }
}

bool DirectLink::room(uint32_t lane) {
  if (sent_[lane] - known_consumed_[lane] < kMessages) return true;
  // One look at the peer's line serves all lanes.
  for (uint32_t i = 0; i < kLanes; ++i) {
    known_consumed_[i] = in_.consumed[i].load(std::memory_order_acquire);
  }
  return sent_[lane] - known_consumed_[lane] < kMessages;
}

std::byte* DirectLink::staging(uint32_t lane, uint64_t number) {
  Block& block = staging_[lane][number % kMessages];
  if (block.data == nullptr) {
    absl::StatusOr<Block> made = ends_.memory.allocate(ends_.slot_bytes);
    if (!made.ok()) return nullptr;
    block = *made;
  }
  return block.data;
}

uint64_t DirectLink::send(uint32_t lane, const Segments& source, const CallTag& tag) {
  if (!room(lane)) return 0;
  const uint64_t number = sent_[lane] + 1;
  DirectMessage& entry = out_.messages[lane][number % kMessages];
  const size_t length = source.total();
  if (length <= DirectMessage::kPayload) {
    copy({entry.payload(length), length, 1, 0}, source);
    entry.kind = DirectMessage::kInline;
  } else {
    Segments place = source;
    const Memory::Region* region = ends_.memory.find(place);
    if (region == nullptr) {
      place = {staging(lane, number), length, 1, 0};
      if (place.data == nullptr) return 0;
      copy(place, source);
      region = ends_.memory.find(place);
    }
    const InPlaceRuns where{region->number, place.count,
                            static_cast<uint64_t>(place.data - region->local.base), place.bytes,
                            place.stride};
    std::memcpy(entry.payload(sizeof where), &where, sizeof where);
    entry.kind = DirectMessage::kInPlace;
  }
  inline_[lane][number % kMessages] = length <= DirectMessage::kPayload;
  entry.fingerprint = tag.fingerprint;
  entry.sequence = tag.call->sequence;
  entry.length = length;
  entry.number.store(number, std::memory_order_release);
  sent_[lane] = number;
  dirty_ = true;
  // Pieces take the lanes in turn. The next one's line was last read by the peer: it comes back
  // while this message travels. Behind a longer one the peer is still reading when it would come,
  // and asks for it again before it is written.
  constexpr size_t kReadAtOnce = 1024;
  const uint32_t next = lane + 1 < kLanes ? lane + 1 : 0;
  if (length < kReadAtOnce) {
    base::prefetch_to_write(&out_.messages[next][(sent_[next] + 1) % kMessages]);
  }
  return number;
}

bool DirectLink::delivered(uint32_t lane, uint64_t number) {
  if (known_consumed_[lane] >= number) return true;
  // A message that carried its bytes does not need the source.
  if (sent_[lane] - number < kMessages && inline_[lane][number % kMessages]) return true;
  known_consumed_[lane] = in_.consumed[lane].load(std::memory_order_acquire);
  return known_consumed_[lane] >= number;
}

absl::StatusOr<const std::byte*> DirectLink::map(const InPlaceRuns& place, uint64_t length) {
  if (place.runs == 0 || place.runs > UINT16_MAX || place.run_bytes > length ||
      place.run_bytes * place.runs != length || place.stride > SIZE_MAX / 2 / place.runs) {
    return absl::InvalidArgumentError("the peer sent an invalid location");
  }
  while (views_.size() <= place.region) {
    const auto number = static_cast<uint32_t>(views_.size());
    if (number >= std::min<size_t>(their_regions_.count.load(std::memory_order_acquire),
                                   Memory::kMaxRegions)) {
      return absl::UnavailableError("the peer has not published that region yet");
    }
    auto region = RemoteRegion::decode(
        std::string_view(their_regions_.regions[number].bytes, RemoteRegion::kEncodedBytes));
    if (!region.ok()) return region.status();
    absl::StatusOr<RemoteView> view = ends_.worker.view(ends_.peer, *region);
    if (!view.ok()) return view.status();
    views_.push_back(*std::move(view));
  }
  const RemoteView& view = views_[place.region];
  const uint64_t span = place.stride * (place.runs - 1) + place.run_bytes;
  if (place.offset > view.size || span > view.size - place.offset) {
    return absl::OutOfRangeError("the peer named bytes outside its region");
  }
  return view.data + place.offset;
}

bool DirectLink::peek(uint32_t lane, size_t, const CallTag& tag, Segments& message,
                      absl::Status& error) {
  const uint64_t number = taken_[lane] + 1;
  const DirectMessage& entry = in_.messages[lane][number % kMessages];
  if (entry.number.load(std::memory_order_acquire) != number) return false;
  if (entry.fingerprint != tag.fingerprint) {
    error = absl::FailedPreconditionError(absl::StrFormat(
        "the peer sent %u bytes of another call: both ends must name the same count and type, "
        "in the same kind of call",
        entry.length));
    return false;
  }
  const uint64_t length = entry.length;
  if (entry.kind == DirectMessage::kInline) {
    if (length > DirectMessage::kPayload) {
      error = absl::InvalidArgumentError("the peer sent a message that is too long");
      return false;
    }
    message = {const_cast<std::byte*>(entry.payload(length)), length, 1, 0};
    return true;
  }
  if (theirs_.ended.load(std::memory_order_acquire) != 0)
    return false;  // a control message says why
  InPlaceRuns where;
  std::memcpy(&where, entry.payload(sizeof where), sizeof where);
  absl::StatusOr<const std::byte*> data = map(where, length);
  if (!data.ok()) {
    // Its file may still be on its way to us.
    if (!absl::IsUnavailable(data.status())) error = data.status();
    return false;
  }
  message = {const_cast<std::byte*>(*data), where.run_bytes, where.runs, where.stride};
  return true;
}

bool DirectLink::stray(uint32_t lane, uint64_t sequence) const {
  const uint64_t number = taken_[lane] + 1;
  const DirectMessage& entry = in_.messages[lane][number % kMessages];
  return entry.number.load(std::memory_order_acquire) == number && entry.sequence <= sequence;
}

bool DirectLink::consume(uint32_t lane) {
  const uint64_t number = taken_[lane] + 1;
  const DirectMessage& entry = in_.messages[lane][number % kMessages];
  const bool in_place = entry.kind == DirectMessage::kInPlace;
  if (in_place) {
    std::atomic_thread_fence(std::memory_order_acquire);
    if (theirs_.ended.load(std::memory_order_relaxed) != 0) return false;
    in_place_bytes_ += entry.length;
  }
  taken_[lane] = number;
  out_.consumed[lane].store(number, std::memory_order_release);
  // Whoever sent in place waits for this. Whoever sent a message does so only when out of room, and
  // would have to fall asleep in this very moment to miss it.
  if (in_place) {
    dirty_ = true;
  } else {
    consumed_ = true;
  }
  return true;
}

bool DirectLink::tell(const Packet& packet, absl::Span<const std::byte> behind) {
  if (told_ - known_heard_ == Outbox::kPackets) {
    known_heard_ = in_.heard.load(std::memory_order_acquire);
    if (told_ - known_heard_ == Outbox::kPackets) return false;
  }
  DirectPacket& entry = out_.packets[(told_ + 1) % Outbox::kPackets];
  entry.packet = packet;
  entry.size = static_cast<uint32_t>(behind.size());
  if (!behind.empty()) std::memcpy(entry.payload(behind.size()), behind.data(), behind.size());
  entry.number.store(++told_, std::memory_order_release);
  dirty_ = true;
  return true;
}

bool DirectLink::hear(Packet& packet, absl::Span<const std::byte>& behind) {
  const DirectPacket& entry = in_.packets[(heard_ + 1) % Outbox::kPackets];
  if (entry.number.load(std::memory_order_acquire) != heard_ + 1) return false;
  packet = entry.packet;
  const size_t size = std::min<size_t>(entry.size, DirectPacket::kPayload);
  behind = {const_cast<DirectPacket&>(entry).payload(size), size};
  return true;
}

void DirectLink::heard() {
  out_.heard.store(++heard_, std::memory_order_release);
  consumed_ = true;
}

bool DirectLink::show(const std::byte* data, size_t bytes, Place& place) {
  const Memory::Region* region = ends_.memory.find({const_cast<std::byte*>(data), bytes, 1, 0});
  if (region == nullptr) return false;
  const InPlaceRuns where{region->number, 1, static_cast<uint64_t>(data - region->local.base),
                          bytes, 0};
  return place.set({reinterpret_cast<const std::byte*>(&where), sizeof where});
}

absl::StatusOr<const std::byte*> DirectLink::look(const Place& place, size_t bytes) {
  if (theirs_.ended.load(std::memory_order_acquire) != 0) {
    return absl::UnavailableError("the peer's calls have ended");  // a control message says why
  }
  InPlaceRuns where;
  if (place.size != sizeof where) {
    return absl::InvalidArgumentError("the peer sent an invalid location");
  }
  std::memcpy(&where, place.bytes.data(), sizeof where);
  return map(where, bytes);
}

bool DirectLink::looked_well(size_t bytes) {
  std::atomic_thread_fence(std::memory_order_acquire);
  if (theirs_.ended.load(std::memory_order_relaxed) != 0) return false;
  in_place_bytes_ += bytes;
  return true;
}

void DirectLink::flush() {
  const bool consumed = std::exchange(consumed_, false);
  if (!std::exchange(dirty_, false)) {
    if (consumed && theirs_.sleeping.load(std::memory_order_relaxed) != 0) wake();
    return;
  }
  // The sleeper raises its flag and then checks our messages again; this side publishes and then
  // checks the flag. One of the two therefore sees the other.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (theirs_.sleeping.load(std::memory_order_relaxed) != 0) wake();
}

void DirectLink::wake() {
  ends_.worker.notify_detached(ends_.peer, "w").IgnoreError();
  ends_.worker.progress();
}

}  // namespace baton::collectives::executor
