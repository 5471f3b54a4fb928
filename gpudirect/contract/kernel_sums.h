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
#include <optional>
#include <utility>
#include <vector>

#include "gpudirect/contract/stream_slot.h"
#include "gpudirect/copies/planner.h"
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

  absl::Status pin(absl::Span<std::byte> memory) override;
  absl::Status begin(size_t slot, const internal::VectorSum& sum) override;
  std::optional<absl::Status> ended(size_t slot) override;
  double seconds(const internal::VectorSum& sum) const override;

 private:
  // A sum, and how far it is, in elements; its parts go one after the other.
  struct Work {
    StreamSlot slot;
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
  bool pinned(const std::byte* at, size_t bytes) const;
  Stream stream(size_t slot) const { return streams_[slot % streams_.size()]; }
  std::byte* pinned_share(size_t slot) const { return pages_->as<std::byte>() + slot * kShare; }
  // False: an error before anything was queued.
  bool queue(size_t slot);
  // `any`: something of it is queued, also after an error.
  absl::Status queue_part(size_t slot, bool& any);
  // A part has ended without an error. Whether there is another.
  bool part_ended(size_t slot);

  const Device& device_;
  const Launcher& launcher_;
  const CopyTable copies_;
  const SumCosts costs_;
  bool ending_ = false;
  std::unique_ptr<DeviceSlab> slab_;
  std::unique_ptr<RegisteredPages> pages_;
  std::array<Stream, 2> streams_{};  // so that copies of one slot pass by another's kernel
  std::array<Work, kSlots> work_;
  std::vector<std::pair<absl::Span<std::byte>, std::shared_ptr<void>>> pins_;
};

}  // namespace baton::gpudirect
