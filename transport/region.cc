// The table of registered regions and the check that guards every remote access.
#include "transport/region.h"

#include <fcntl.h>

#include "absl/strings/str_format.h"
#include "transport/base/nearest_name.h"
#include "transport/base/wire.h"
#include "transport/base/worker_keys.h"

namespace baton {
namespace {

uint64_t random_key() {
  uint64_t key = 0;
  while (key == 0) base::fill_with_secret(&key, sizeof key);
  return key;
}

bool cannot_shrink(const BackingFile& file) {
  if (file.fd < 0 || file.dma_buf) return false;
  const int seals = fcntl(file.fd, F_GET_SEALS);
  return seals >= 0 && (seals & F_SEAL_SHRINK) != 0;
}

const char* name_of(Access access) {
  constexpr const char* kNames[] = {"local only", "remote read", "remote write",
                                    "remote read and write"};
  static_assert(std::size(kNames) == static_cast<size_t>(Access::kRemoteReadWrite) + 1);
  return base::name_at(kNames, access, "?");
}

}  // namespace

std::string WorkerUid::hex() const {
  std::string out;
  for (uint8_t byte : bytes) absl::StrAppendFormat(&out, "%02x", byte);
  return out;
}

WorkerUid WorkerUid::random() { return {base::make_worker_secret()}; }

std::string RemoteRegion::encode() const {
  std::string out;
  base::WireWriter wire(out);
  wire(owner.bytes, key, size, index, generation,
       static_cast<uint64_t>(access) | static_cast<uint64_t>(kind) << 8 |
           static_cast<uint64_t>(direct) << 9);
  return out;
}

absl::StatusOr<RemoteRegion> RemoteRegion::decode(std::string_view bytes) {
  base::WireReader in(bytes);
  RemoteRegion region;
  in(region.owner.bytes, region.key, region.size, region.index, region.generation);
  const uint64_t word = in.number<uint64_t>();
  const uint64_t access = word & 3;
  region.kind = static_cast<MemoryKind>(word >> 8 & 1);
  region.direct = (word >> 9 & 1) != 0;
  if (!in.finished() || (word & ~uint64_t{0x303}) != 0 || region.generation == 0) {
    return absl::InvalidArgumentError(
        "not a RemoteRegion: pass on the bytes of RemoteRegion::encode() unchanged");
  }
  region.access = static_cast<Access>(access);
  return region;
}

RegionTable::RegionTable(WorkerUid owner) : owner_(owner) {
  entries_.reserve(kCapacity);
  entries_.emplace_back();  // a transfer of no bytes names the first row, in use or not
  free_.push_back(0);
}

absl::StatusOr<RegionEntry*> RegionTable::add(std::byte* base, size_t size, Access access,
                                              BackingFile file) {
  if (base == nullptr || size == 0) {
    return absl::InvalidArgumentError("registering no memory: pass an address and a size > 0");
  }
  if (free_.empty() && entries_.size() == kCapacity) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "all %u regions are in use: register large ranges once and use a MemoryPool", kCapacity));
  }
  if (free_.empty()) {
    // So that giving a row back never needs memory.
    if (free_.capacity() <= entries_.size()) free_.reserve(2 * entries_.size() + 64);
    free_.push_back(static_cast<uint32_t>(entries_.size()));
    entries_.push_back({.index = free_.back()});
  }
  RegionEntry& entry = entries_[free_.back()];
  free_.pop_back();
  if (++generation_ == 0) ++generation_;
  entry = {.base = base,
           .size = size,
           .key = random_key(),
           .index = entry.index,
           .generation = generation_,
           .access = access,
           .file = file,
           .stays = cannot_shrink(file),
           .users = 0,
           .writable = true};
  ++registrations_;
  return &entry;
}

absl::Status RegionTable::remove(const MemoryRegion& region) {
  auto entry = find(region);
  if (!entry.ok()) return entry.status();
  (*entry)->generation = 0;
  (*entry)->key = 0;
  free_.push_back((*entry)->index);
  return absl::OkStatus();
}

absl::StatusOr<RegionEntry*> RegionTable::find(const MemoryRegion& region) {
  if (region.generation == 0 || region.index >= entries_.size() ||
      entries_[region.index].generation != region.generation) {
    return absl::NotFoundError("the local memory region is not registered, or no longer");
  }
  return &entries_[region.index];
}

absl::StatusOr<std::byte*> RegionTable::resolve(uint32_t index, uint32_t generation, uint64_t key,
                                                Access want, uint64_t offset, uint64_t bytes,
                                                By by) {
  if (index >= entries_.size() || generation == 0 || entries_[index].generation != generation) {
    return absl::NotFoundError(
        "the remote region is stale: its owner deregistered it; fetch its RemoteRegion again");
  }
  const RegionEntry& entry = entries_[index];
  if (entry.key != key) {
    return absl::PermissionDeniedError(
        "the remote region's key is wrong: use the RemoteRegion that its owner gave out");
  }
  if (!allows(entry.access, want)) {
    return absl::PermissionDeniedError(
        absl::StrFormat("the remote region allows %s only: its owner must register it for %s",
                        name_of(entry.access), name_of(want)));
  }
  const bool host = entry.place.kind == MemoryKind::kHost;
  if (by == By::kDevice && host) {
    return absl::InvalidArgumentError("the remote region is memory of its owner's host");
  }
  if (want != Access::kLocal && by == By::kCpu && !host) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "the remote region is memory of %s, which its owner's CPU cannot touch: reach it over "
        "verbs, or have its owner register host memory",
        entry.place.name()));
  }
  if (bytes > entry.size || offset > entry.size - bytes) {
    return absl::OutOfRangeError(absl::StrFormat(
        "bytes [%u, +%u) are outside the remote region of %u bytes", offset, bytes, entry.size));
  }
  return entry.base + offset;
}

RemoteRegion RegionTable::describe(const RegionEntry& entry) const {
  return {.owner = owner_,
          .key = entry.key,
          .size = entry.size,
          .index = entry.index,
          .generation = entry.generation,
          .access = entry.access,
          .kind = entry.place.kind,
          .direct = entry.direct};
}

}  // namespace baton
