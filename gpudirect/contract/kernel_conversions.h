// Conversions of rows by a kernel, for plans of agents that requantise: where the rows lie is
// copied onto the device, for every warp reads it, and the kernel goes over the device's own
// memory.
//
//   boxes --copy--> slab --kernel--> rows of fp8, and their scales
//
// Long lists go in parts that fit into a slot's share of the slab.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "gpudirect/device_memory.h"
#include "gpudirect/launcher.h"
#include "gpudirect/registered_pages.h"
#include "transport/internal/device_memory.h"

namespace baton::gpudirect {

// Ends after its conversions have; the device and the launcher outlive it.
class KernelConversions final : public internal::RowConversions {
 public:
  static constexpr size_t kShareBoxes = 2048;  // of a slot, at a time

  static absl::StatusOr<std::unique_ptr<KernelConversions>> create(const Device& device,
                                                                   const Launcher& launcher);
  ~KernelConversions() override;
  KernelConversions(const KernelConversions&) = delete;
  KernelConversions& operator=(const KernelConversions&) = delete;

  absl::Status begin(size_t slot, absl::Span<const internal::RowBox> boxes) override;
  std::optional<absl::Status> ended(size_t slot) override;

 private:
  struct Slot {
    Event event = nullptr;
    bool busy = false;
    bool recorded = false;  // else the stream itself is asked
    uint32_t errors = 0;    // of asking, one after the other
    absl::Status status;
    std::vector<internal::RowBox> boxes;  // those of one form one behind the other
    size_t done = 0;                      // boxes that are queued, or have been
  };

  KernelConversions(const Device& device, const Launcher& launcher)
      : device_(device), launcher_(launcher) {}
  absl::Status start();
  Stream stream(size_t slot) const { return streams_[slot % streams_.size()]; }
  // Queues the next part. False: an error before anything was queued.
  bool queue_part(size_t slot);
  absl::Status queue_part(size_t number, bool& any);

  const Device& device_;
  const Launcher& launcher_;
  std::unique_ptr<DeviceSlab> slab_;
  std::unique_ptr<RegisteredPages> pages_;  // that boxes are copied from
  std::array<Stream, 2> streams_{};         // so that one slot's boxes pass by another's kernel
  std::array<Slot, kSlots> slots_;
};

}  // namespace baton::gpudirect
