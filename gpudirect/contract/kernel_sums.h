// Sums of vectors by a kernel, for collectives: what lies in the host's memory is brought onto the
// device by copy engines, combined there with what lies on the device, and the result goes back.
//
//   sources of the host --copies--> slab --kernel--> slab --copy--> target
//   sources of the device ----------------^
//
// The kernel runs for as long as it reads and writes the device's own memory, which is a hundredth
// of what the copies take: it never waits for the host's memory. Long vectors go in parts that fit
// into a slot's share of the slab; sums in other slots run meanwhile.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "gpudirect/copies/planner.h"
#include "gpudirect/copies/sum_costs.h"
#include "gpudirect/device_memory.h"
#include "gpudirect/launcher.h"
#include "gpudirect/registered_pages.h"
#include "transport/internal/device_memory.h"

namespace baton::gpudirect {

// Ends after its sums have; the device and the launcher outlive it.
class KernelSums final : public internal::VectorSums {
 public:
  static constexpr size_t kShare = 1 << 20;  // of a slot, of the slab and of pinned memory

  static absl::StatusOr<std::unique_ptr<KernelSums>> create(const Device& device,
                                                            const Launcher& launcher,
                                                            const CopyTable& copies,
                                                            const SumCosts& sums);
  ~KernelSums() override;
  KernelSums(const KernelSums&) = delete;
  KernelSums& operator=(const KernelSums&) = delete;

  absl::Status pin(absl::Span<std::byte> memory) override;
  absl::Status begin(size_t slot, const internal::VectorSum& sum) override;
  std::optional<absl::Status> ended(size_t slot) override;
  double seconds(const internal::VectorSum& sum) const override;

 private:
  struct Slot {
    Event event = nullptr;
    bool busy = false;
    bool recorded = false;  // else the stream itself is asked
    uint32_t errors = 0;    // of asking, one after the other
    absl::Status status;
    // The sum, and how far it is, in elements.
    internal::VectorSum sum;
    std::vector<internal::VectorSum::Source> sources;
    size_t done = 0;
    size_t part = 0;
    bool target_pinned = false;  // of this part
  };

  KernelSums(const Device& device, const Launcher& launcher, const CopyTable& copies,
             const SumCosts& sums)
      : device_(device), launcher_(launcher), copies_(copies), costs_(sums) {}
  absl::Status start();
  Stream stream(size_t slot) const { return streams_[slot % streams_.size()]; }
  std::byte* pinned_share(size_t slot) const { return bounce_->as<std::byte>() + slot * kShare; }
  bool pinned(const std::byte* at, size_t bytes) const;
  // Queues the next part. False: an error before anything was queued.
  bool queue_part(size_t slot);
  absl::Status queue_part(size_t number, bool& any);

  const Device& device_;
  const Launcher& launcher_;
  const CopyTable copies_;
  const SumCosts costs_;
  std::unique_ptr<DeviceSlab> slab_;
  std::unique_ptr<RegisteredPages> bounce_;  // for what is not pinned
  std::array<Stream, 2> streams_{};          // so that copies of one slot pass by another's kernel
  std::array<Slot, kSlots> slots_;
  struct Pin {
    absl::Span<std::byte> memory;
    bool ours = false;  // else somebody else has pinned it, for longer
  };
  std::vector<Pin> pins_;
};

}  // namespace baton::gpudirect
