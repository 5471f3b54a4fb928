// Work of kernels in parts: slots that are busy side by side, each with a share of device memory
// and one of pinned memory of the host, on two streams, with an event behind each part. What a part
// is, KernelSums says; here is when one has ended.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "gpudirect/contract/stream_slot.h"
#include "gpudirect/device_memory.h"
#include "gpudirect/registered_pages.h"

namespace baton::gpudirect {

// Not thread-safe. The device outlives it.
class KernelParts {
 public:
  KernelParts(const KernelParts&) = delete;
  KernelParts& operator=(const KernelParts&) = delete;

 protected:
  // `what` it is, for texts: "a sum".
  KernelParts(const Device& device, const char* what) : device_(device), what_(what) {}
  // wait_for_all() has returned.
  ~KernelParts();

  // Memory, streams and events for so many slots, once.
  absl::Status start(size_t slots, size_t share);
  // No part follows those on their way, which have ended when it returns.
  void wait_for_all();

  Stream stream(size_t slot) const { return streams_[slot % streams_.size()]; }
  DevicePointer device_share(size_t slot) const { return slab_->span().data + slot * share_; }
  std::byte* pinned_share(size_t slot) const { return pages_->as<std::byte>() + slot * share_; }

  // Queues the first part, of a slot that is free, if there is `any`. An error: nothing was queued.
  absl::Status begin_parts(size_t slot, bool any);
  // How its parts ended, once all have or one has failed; nothing as long as one may touch memory.
  std::optional<absl::Status> parts_ended(size_t slot);

  // Queues the slot's next part on its stream. `any`: something of it is queued, also after an
  // error.
  virtual absl::Status queue_part(size_t slot, bool& any) = 0;
  // A part has ended without an error. Whether there is another.
  virtual bool part_ended(size_t slot) = 0;

  const Device& device_;

 private:
  // False: an error before anything was queued.
  bool queue(size_t slot);

  const char* const what_;
  size_t share_ = 0;
  bool ending_ = false;
  std::unique_ptr<DeviceSlab> slab_;
  std::unique_ptr<RegisteredPages> pages_;
  std::array<Stream, 2> streams_{};  // so that copies of one slot pass by another's kernel
  std::vector<StreamSlot> slots_;
};

}  // namespace baton::gpudirect
