// A slab of a device as a buffer that the host fills and looks at: benchmarks and tests of programs
// that have no framework.
#pragma once

#include <memory>

#include "gpudirect/device_memory.h"
#include "transport/internal/device_memory.h"

namespace baton::gpudirect {

// Not thread-safe. The device outlives it.
class SlabBuffer final : public internal::DeviceBuffer {
 public:
  // InvalidArgument for no bytes; ResourceExhausted, or the driver's words, where there is no such
  // memory. Pins up to 8 MiB of the host's memory for the copies.
  static absl::StatusOr<std::unique_ptr<SlabBuffer>> create(const Device& device, size_t bytes);

  std::byte* data() const override;
  size_t size() const override { return slab_->span().size; }
  absl::Status put(size_t offset, absl::Span<const std::byte> bytes) override;
  absl::Status get(size_t offset, absl::Span<std::byte> bytes) override;

 private:
  SlabBuffer(std::unique_ptr<DeviceSlab> slab, std::unique_ptr<internal::StagingRing> ring)
      : slab_(std::move(slab)), ring_(std::move(ring)) {}
  absl::Status check(size_t offset, size_t bytes) const;
  absl::Status copy(internal::CopyDirection direction, size_t offset, size_t bytes);

  std::unique_ptr<DeviceSlab> slab_;
  std::unique_ptr<internal::StagingRing> ring_;
};

}  // namespace baton::gpudirect
