// The packets of a TransferLink, mostly grants, and the writes to granted memory for sends and
// receives.
#include <algorithm>
#include <cstring>

#include "collectives/executor/transfer_link.h"

namespace baton::collectives::executor {

void TransferLink::grant_next(uint32_t lane, uint32_t ahead, const Segments& place) {
  const uint64_t number = taken_[lane] + ahead;
  Granted& granted = granted_[lane][number % kSlots];
  granted.number = number;
  granted.data = place.data;
  granted.bytes = place.total();
  if (granted.bytes > 0 && (place.data == nullptr || memory_.find(place) == nullptr)) {
    if (absl::Status status = stage(granted.staging, granted.bytes); !status.ok()) {
      return fail(status);
    }
    granted.data = granted.staging.data;
  }
  untold_.emplace_back(lane, number);
}

void TransferLink::tell_grants() {
  constexpr size_t kKey = RemoteRegion::kEncodedBytes;
  constexpr size_t kMost = (kInlineNotification - kHead - kKey) / sizeof(Grant);
  Packet packet;
  packet.kind = Packet::Kind::kPlaces;
  while (!untold_.empty()) {
    std::array<std::byte, kKey + kMost * sizeof(Grant)> text{};
    uint64_t region = 0;  // of all, by its key
    size_t told = 0;
    for (; told < std::min(untold_.size(), kMost); ++told) {
      const auto& [lane, number] = untold_[told];
      const Granted& granted = granted_[lane][number % kSlots];
      Grant grant;
      grant.bytes = static_cast<uint32_t>(granted.bytes);
      grant.number = static_cast<uint16_t>(number);
      grant.lane = static_cast<uint16_t>(lane);
      if (granted.bytes > 0) {
        const Memory::Grant* one = memory_.grant(group_, granted.data, granted.bytes, grant.offset);
        if (one == nullptr) {
          return fail(absl::InternalError("memory of ours cannot be granted to the peer"));
        }
        if (region != 0 && region != one->remote.key) break;
        region = one->remote.key;
        std::memcpy(text.data(), one->encoded.data(), kKey);
      }
      std::memcpy(text.data() + kKey + told * sizeof grant, &grant, sizeof grant);
    }
    if (!tell(packet, {text.data(), kKey + told * sizeof(Grant)})) return;
    untold_.erase(untold_.begin(), untold_.begin() + static_cast<ptrdiff_t>(told));
  }
}

void TransferLink::write_head(char* to, const Packet& packet) const {
  std::memcpy(to, &group_, sizeof group_);
  to[sizeof group_] = kPacket;
  std::memcpy(to + sizeof group_ + 1, &packet, sizeof packet);
}

bool TransferLink::tell(const Packet& packet, absl::Span<const std::byte> behind) {
  std::array<char, kHead + kMostBehind> text;
  write_head(text.data(), packet);
  if (!behind.empty()) std::memcpy(text.data() + kHead, behind.data(), behind.size());
  const absl::Status sent = worker_.notify_detached(peer_, {text.data(), kHead + behind.size()});
  if (sent.ok()) {
    submitted_ = true;
  } else if (!absl::IsResourceExhausted(sent)) {
    fail(sent);
  }
  return sent.ok();
}

std::optional<CallDescriptor> TransferLink::came(std::string_view bytes) {
  Packet packet;
  if (bytes.size() < sizeof packet) return std::nullopt;
  std::memcpy(&packet, bytes.data(), sizeof packet);
  if (packet.kind == Packet::Kind::kAsk) {
    answer();
    return std::nullopt;
  }
  if (packet.kind == Packet::Kind::kSlots) {
    absl::StatusOr<Slots> theirs = Slots::decode(bytes.substr(sizeof packet));
    if (!theirs.ok()) {
      fail(theirs.status());
    } else {
      their_slots_ = *theirs;
    }
    return std::nullopt;
  }
  if (packet.kind == Packet::Kind::kPlaces) {
    if (absl::Status status = on_grants(bytes.substr(sizeof packet)); !status.ok()) fail(status);
    return std::nullopt;
  }
  if (next_came_ == came_.size()) {
    came_.clear();
    next_came_ = 0;
  }
  const auto size = static_cast<uint32_t>(bytes.size());
  const auto* length = reinterpret_cast<const std::byte*>(&size);
  const auto* data = reinterpret_cast<const std::byte*>(bytes.data());
  came_.insert(came_.end(), length, length + sizeof size);
  came_.insert(came_.end(), data, data + size);
  if (packet.kind != Packet::Kind::kSend || packet.of_v == 0) return std::nullopt;
  return CallDescriptor{.node_size = packet.whole,
                        .collective = static_cast<uint8_t>(Collective::kSendReceive),
                        .type = packet.type,
                        .of_v = 1};
}

absl::Status TransferLink::on_grants(std::string_view bytes) {
  if (bytes.size() < RemoteRegion::kEncodedBytes) {
    return absl::InvalidArgumentError("the peer's grants have the wrong length");
  }
  // There is none where all places are empty.
  const auto region = RemoteRegion::decode(bytes.substr(0, RemoteRegion::kEncodedBytes));
  bytes.remove_prefix(RemoteRegion::kEncodedBytes);
  for (; bytes.size() >= sizeof(Grant); bytes.remove_prefix(sizeof(Grant))) {
    Grant grant;
    std::memcpy(&grant, bytes.data(), sizeof grant);
    if (grant.bytes > 0 && !region.ok()) return region.status();
    if (grant.lane >= kLanes) {
      return absl::InvalidArgumentError("the peer granted a place in a lane that does not exist");
    }
    const uint64_t sent = sent_[grant.lane];
    const auto ahead = static_cast<uint16_t>(grant.number - sent);
    // Else it has called something else, which what we announce tells it.
    if (ahead == 0 || ahead > schedules::kMessagesAhead) continue;
    TheirPlace& place = their_places_[grant.lane][grant.number % kSlots];
    place = {sent + ahead, region.ok() ? *region : RemoteRegion{}, grant.offset, grant.bytes};
    if (place.number > schedules::kMessagesAhead) {
      granted_room_[grant.lane] =
          std::max(granted_room_[grant.lane], place.number - schedules::kMessagesAhead);
    }
  }
  return absl::OkStatus();
}

bool TransferLink::hear(Packet& packet, absl::Span<const std::byte>& behind) {
  if (next_came_ == came_.size()) return false;
  const std::byte* at = came_.data() + next_came_;
  uint32_t size = 0;
  std::memcpy(&size, at, sizeof size);
  std::memcpy(&packet, at + sizeof size, sizeof packet);
  behind = {at + sizeof size + sizeof packet, size - sizeof packet};
  return true;
}

void TransferLink::heard() {
  uint32_t size = 0;
  std::memcpy(&size, came_.data() + next_came_, sizeof size);
  next_came_ += sizeof size + size;
}

bool TransferLink::grant(std::byte* data, size_t bytes, Place& place) {
  uint64_t offset = 0;
  const Memory::Grant* granted = memory_.grant(group_, data, bytes, offset);
  if (granted == nullptr) return false;
  static_assert(RemoteRegion::kEncodedBytes + sizeof offset <= sizeof place.bytes);
  place.size = RemoteRegion::kEncodedBytes + sizeof offset;
  std::memcpy(place.bytes.data(), granted->encoded.data(), granted->encoded.size());
  std::memcpy(place.bytes.data() + RemoteRegion::kEncodedBytes, &offset, sizeof offset);
  return true;
}

bool TransferLink::can_write(const std::byte* data, size_t bytes) const {
  return memory_.find({const_cast<std::byte*>(data), bytes, 1, 0}) != nullptr;
}

uint32_t TransferLink::write(const std::byte* source, size_t bytes, const Place& place,
                             const Packet& packet) {
  uint32_t number = 0;
  while (number < kWrites && writes_[number].used) ++number;
  if (number == kWrites) return 0;
  const std::string_view text(reinterpret_cast<const char*>(place.bytes.data()), place.size);
  uint64_t offset = 0;
  if (text.size() != RemoteRegion::kEncodedBytes + sizeof offset) {
    fail(absl::InvalidArgumentError("the peer granted a place of another form"));
    return 0;
  }
  const auto remote = RemoteRegion::decode(text.substr(0, RemoteRegion::kEncodedBytes));
  if (!remote.ok()) {
    fail(remote.status());
    return 0;
  }
  std::memcpy(&offset, text.data() + RemoteRegion::kEncodedBytes, sizeof offset);
  const Memory::Region* region = memory_.find({const_cast<std::byte*>(source), bytes, 1, 0});
  if (region == nullptr) return 0;  // can_write() said so
  char note[kHead];
  write_head(note, packet);
  TransferRequest request;
  request.op = Op::kWrite;
  request.peer = peer_;
  request.local = region->local;
  request.local_layout =
      Layout::contiguous(static_cast<size_t>(source - region->local.base), bytes);
  request.remote = *remote;
  request.remote_layout = Layout::contiguous(offset, bytes);
  request.notify = std::string_view(note, sizeof note);
  request.on_end = &TransferLink::on_written;
  Write& write = writes_[number];
  request.context = &write;
  request.detached = true;
  write.under_way.store(true, std::memory_order_relaxed);
  open_.fetch_add(1, std::memory_order_relaxed);
  absl::StatusOr<TransferId> id = worker_.submit(request);
  if (!id.ok()) {
    open_.fetch_sub(1, std::memory_order_relaxed);
    if (!absl::IsResourceExhausted(id.status())) fail(id.status());
    return 0;
  }
  write.id = *id;
  write.used = true;
  submitted_ = true;
  return number + 1;
}

void TransferLink::on_written(void* context, TransferId, const absl::Status& status) {
  auto& write = *static_cast<Write*>(context);
  TransferLink& link = *write.link;
  if (status.ok()) {
    write.under_way.store(false, std::memory_order_release);
  } else {
    link.fail(status);
  }
  link.open_.fetch_sub(1, std::memory_order_release);
}

bool TransferLink::written(uint32_t number) {
  Write& write = writes_[number - 1];
  if (write.under_way.load(std::memory_order_acquire)) return false;
  write.used = false;
  return true;
}

}  // namespace baton::collectives::executor
