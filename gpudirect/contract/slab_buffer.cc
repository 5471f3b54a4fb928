// Copies between a slab and the host's memory, a piece at a time, each waited for.
#include "gpudirect/contract/slab_buffer.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_format.h"
#include "gpudirect/contract/staging.h"

namespace baton::gpudirect {
namespace {

constexpr size_t kPiece = 8 << 20;
constexpr size_t kPage = 4096;

}  // namespace

absl::StatusOr<std::unique_ptr<SlabBuffer>> SlabBuffer::create(const Device& device, size_t bytes) {
  if (bytes == 0) return absl::InvalidArgumentError("a buffer of 0 bytes on a device");
  auto slab = DeviceSlab::create(device, bytes);
  if (!slab.ok()) return slab.status();
  auto ring = PinnedRing::create(device, std::min(kPiece, (bytes + kPage - 1) / kPage * kPage));
  if (!ring.ok()) return ring.status();
  return std::unique_ptr<SlabBuffer>(new SlabBuffer(*std::move(slab), *std::move(ring)));
}

std::byte* SlabBuffer::data() const {
  return reinterpret_cast<std::byte*>(static_cast<uintptr_t>(slab_->span().data));
}

absl::Status SlabBuffer::check(size_t offset, size_t bytes) const {
  if (offset <= size() && bytes <= size() - offset) return absl::OkStatus();
  return absl::OutOfRangeError(
      absl::StrFormat("%u bytes from %u on: a buffer on a device has %u", bytes, offset, size()));
}

absl::Status SlabBuffer::copy(internal::CopyDirection direction, size_t offset, size_t bytes) {
  const internal::CopyRun run{data() + offset, ring_->memory().data(), bytes};
  ring_->copy(direction, 1, false, {&run, 1});
  absl::Status result;
  while (ring_->busy()) {
    ring_->progress([&](uint64_t, absl::Status status) { result = std::move(status); });
  }
  return result;
}

absl::Status SlabBuffer::put(size_t offset, absl::Span<const std::byte> bytes) {
  if (absl::Status status = check(offset, bytes.size()); !status.ok()) return status;
  const size_t most = ring_->memory().size();
  for (size_t at = 0; at < bytes.size(); at += most) {
    const size_t piece = std::min(most, bytes.size() - at);
    std::memcpy(ring_->memory().data(), bytes.data() + at, piece);
    if (absl::Status status = copy(internal::CopyDirection::kToDevice, offset + at, piece);
        !status.ok()) {
      return status;
    }
  }
  return absl::OkStatus();
}

absl::Status SlabBuffer::get(size_t offset, absl::Span<std::byte> bytes) {
  if (absl::Status status = check(offset, bytes.size()); !status.ok()) return status;
  const size_t most = ring_->memory().size();
  for (size_t at = 0; at < bytes.size(); at += most) {
    const size_t piece = std::min(most, bytes.size() - at);
    if (absl::Status status = copy(internal::CopyDirection::kToHost, offset + at, piece);
        !status.ok()) {
      return status;
    }
    std::memcpy(bytes.data() + at, ring_->memory().data(), piece);
  }
  return absl::OkStatus();
}

}  // namespace baton::gpudirect
