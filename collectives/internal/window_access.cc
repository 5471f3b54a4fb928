// An access to a window: what it reaches, its name in messages, and what is refused.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "collectives/internal/windows.h"

namespace baton::collectives::internal {

size_t Windows::Access::reach() const {
  if (rows.from.empty()) return bytes;
  const size_t last = *std::max_element(rows.from.begin(), rows.from.end());
  return last * rows.from_stride + rows.row_bytes;
}

size_t Windows::Access::remote_reach() const {
  if (rows.to.empty()) return bytes;
  const size_t last = *std::max_element(rows.to.begin(), rows.to.end());
  return last * rows.to_stride + rows.row_bytes;
}

Layout Windows::Access::local_layout(size_t base) const {
  if (rows.from.empty()) return Layout::contiguous(base, bytes);
  return Layout::paged(base, rows.from, rows.from_stride, rows.row_bytes);
}

Layout Windows::Access::remote_layout(size_t base) const {
  if (rows.to.empty()) return Layout::contiguous(base, bytes);
  return Layout::paged(base, rows.to, rows.to_stride, rows.row_bytes);
}

std::string Windows::label(int rank) const {
  if (rank == static_cast<int>(needs_.mesh.rank())) return absl::StrFormat("rank %d", rank);
  return needs_.mesh.member(static_cast<uint32_t>(rank)).label;
}

// "put of 8 bytes at 64 to rank 3 (host, pid 17)"
std::string Windows::name(const Access& access) const {
  const std::string whose = access.rank == kAnyRank ? "all ranks" : label(access.rank);
  switch (access.kind) {
    case Kind::kPut:
      return absl::StrFormat("put of %u bytes at %u to %s", access.bytes, access.offset, whose);
    case Kind::kGet:
      return absl::StrFormat("get of %u bytes at %u from %s", access.bytes, access.offset, whose);
    case Kind::kSignal:
      return absl::StrFormat("signal %u to %s", access.slot, whose);
    case Kind::kWait:
      return absl::StrFormat("wait for signal %u of %s to be %u", access.slot, whose, access.value);
    default:
      return absl::StrCat("flush to ", whose);
  }
}

absl::Status Windows::about(const Access& access, const absl::Status& why) const {
  if (absl::IsNotFound(why)) {  // the key is stale
    return absl::FailedPreconditionError(
        absl::StrCat(name(access), ": that rank has destroyed its window"));
  }
  return absl::Status(why.code(), absl::StrCat(name(access), ": ", why.message()));
}

absl::Status Windows::check_slot(const Entry& entry, const Access& access) const {
  if (access.slot >= entry.signals) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "the window has %u signals (WindowOptions::signals): use a lower slot", entry.signals));
  }
  const uint64_t before = access.kind == Kind::kWait
                              ? 0
                              : entry.peers[static_cast<size_t>(access.rank)].added[access.slot];
  if (access.value <= CounterTable::kMaxValue - before) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "adding %u to the %u that this rank added before exceeds a signal's limit, 2^48 - 1",
      access.value, before));
}

absl::Status Windows::check_word(const Access& access) const {
  if (access.words == nullptr || access.words->owner != this || !access.words->closed.ok()) {
    return absl::InvalidArgumentError("the window of the word is not one of this communicator");
  }
  const Entry::Peer& peer = access.words->peers[static_cast<size_t>(access.rank)];
  if (peer.bytes < sizeof(uint64_t) || access.word_offset > peer.bytes - sizeof(uint64_t)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "there is no word at %u: that rank's window has %u bytes", access.word_offset, peer.bytes));
  }
  if (access.word_offset % sizeof(uint64_t) != 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the word at %u is not aligned to 8", access.word_offset));
  }
  if (peer.words) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "that rank cannot add to words of that window: it was made without WindowOptions::words, or "
      "its memory is not aligned to 8, or is device memory that the CPU cannot copy to");
}

absl::Status Windows::check(const Entry& entry, const Access& access) const {
  if (access.kind == Kind::kFlush && access.rank == kAnyRank) return absl::OkStatus();
  if (access.rank < 0 || access.rank >= static_cast<int>(needs_.mesh.ranks())) {
    return absl::InvalidArgumentError(
        absl::StrFormat("rank %d: there are %u ranks", access.rank, needs_.mesh.ranks()));
  }
  absl::Status status;
  if (access.adds) {
    status = check_word(access);
  } else if (access.kind == Kind::kPut ? access.value > 0
                                       : access.kind != Kind::kFlush && access.kind != Kind::kGet) {
    status = check_slot(entry, access);
  }
  const Entry::Peer& peer = entry.peers[static_cast<size_t>(access.rank)];
  const size_t reach = access.remote_reach();
  if (reach > peer.bytes || access.offset > peer.bytes - reach) {
    status =
        absl::InvalidArgumentError(absl::StrFormat("that rank's window has %u bytes", peer.bytes));
  } else if (access.bytes > 0 && access.local == nullptr) {
    status = absl::InvalidArgumentError("the local memory is null");
  } else if (access.kind == Kind::kSignal && access.value == 0) {
    status = absl::InvalidArgumentError("a signal adds 1 at least");
  } else if (access.bytes > 0 && access.rank == static_cast<int>(needs_.mesh.rank())) {
    for (const std::byte* data : {access.local, entry.data + access.offset}) {
      const int device = device_of(data, access.bytes);
      if (device < 0 || (copies_.reaches(device) && access.rows.from.empty())) continue;
      status = absl::UnimplementedError(
          "a rank's access to its own window on a device: copy with the device's own means");
    }
  }
  return status.ok() ? status : about(access, status);
}

}  // namespace baton::collectives::internal
