// Streams and events of parts, and whether one has ended.
#include "gpudirect/contract/kernel_parts.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace baton::gpudirect {

absl::Status KernelParts::start(size_t slots, size_t share) {
  share_ = share;
  auto slab = DeviceSlab::create(device_, slots * share, {.rdma = false, .shareable = false});
  if (!slab.ok()) return slab.status();
  slab_ = *std::move(slab);
  auto pages = RegisteredPages::make(device_, slots * share);
  if (!pages.ok()) return pages.status();
  pages_ = *std::move(pages);
  slots_.resize(slots);
  const Device::Current current(device_);
  absl::Status status = current.status();
  for (Stream& stream : streams_) {
    if (!status.ok()) break;
    Stream made = nullptr;
    status =
        device_.check(device_.driver().cuStreamCreateWithPriority(&made, kStreamNonBlocking, 0),
                      absl::StrCat("making a stream for ", what_));
    if (status.ok()) stream = made;
  }
  for (StreamSlot& slot : slots_) {
    if (status.ok()) status = slot.make(device_, what_);
  }
  return status;
}

void KernelParts::wait_for_all() {
  ending_ = true;
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    while (slots_[slot].busy) parts_ended(slot);
  }
}

KernelParts::~KernelParts() {
  device_.give_back([&] {
    for (const StreamSlot& slot : slots_) {
      if (slot.event != nullptr) device_.driver().cuEventDestroy(slot.event);
    }
    for (const Stream stream : streams_) {
      if (stream != nullptr) device_.driver().cuStreamDestroy(stream);
    }
  });
}

absl::Status KernelParts::begin_parts(size_t number, bool any) {
  slots_[number].status = absl::OkStatus();
  return !any || queue(number) ? absl::OkStatus() : slots_[number].status;
}

bool KernelParts::queue(size_t number) {
  StreamSlot& slot = slots_[number];
  bool any = false;
  slot.status.Update(queue_part(number, any));
  if (!any) return false;
  // Part of it may be on its way also after an error.
  const Device::Current current(device_);
  slot.record(device_, stream(number), what_, current.status());
  return true;
}

std::optional<absl::Status> KernelParts::parts_ended(size_t number) {
  StreamSlot& slot = slots_[number];
  if (!slot.busy) return slot.status;
  if (!slot.over(device_, stream(number), what_)) return std::nullopt;
  if (!slot.status.ok() || !part_ended(number) || ending_ || !queue(number)) return slot.status;
  return std::nullopt;
}

}  // namespace baton::gpudirect
