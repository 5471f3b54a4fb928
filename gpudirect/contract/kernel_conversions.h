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

#include "gpudirect/contract/kernel_parts.h"
#include "gpudirect/launcher.h"
#include "transport/internal/device_memory.h"

namespace baton::gpudirect {

// Ends after its conversions have; the device and the launcher outlive it.
class KernelConversions final : public internal::RowConversions, private KernelParts {
 public:
  static constexpr size_t kShareBoxes = 2048;  // of a slot, at a time

  static absl::StatusOr<std::unique_ptr<KernelConversions>> create(const Device& device,
                                                                   const Launcher& launcher);
  ~KernelConversions() override { wait_for_all(); }

  absl::Status begin(size_t slot, absl::Span<const internal::RowBox> boxes) override;
  std::optional<absl::Status> ended(size_t slot) override { return parts_ended(slot); }

 private:
  struct Boxes {
    std::vector<internal::RowBox> all;  // those of one form one behind the other
    size_t done = 0;                    // so many are queued, or have been
  };

  KernelConversions(const Device& device, const Launcher& launcher)
      : KernelParts(device, "a conversion"), launcher_(launcher) {}
  absl::Status queue_part(size_t slot, bool& any) override;
  bool part_ended(size_t slot) override { return boxes_[slot].done < boxes_[slot].all.size(); }

  const Launcher& launcher_;
  std::array<Boxes, kSlots> boxes_;
};

}  // namespace baton::gpudirect
