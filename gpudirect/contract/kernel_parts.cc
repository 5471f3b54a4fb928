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
  for (Slot& slot : slots_) {
    if (!status.ok()) break;
    Event event = nullptr;
    status = device_.check(device_.driver().cuEventCreate(&event, kEventDisableTiming),
                           absl::StrCat("making an event for ", what_));
    if (status.ok()) slot.event = event;
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
    for (const Slot& slot : slots_) {
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
  Slot& slot = slots_[number];
  bool any = false;
  slot.status.Update(queue_part(number, any));
  if (!any) return false;
  // Part of it may be on its way also after an error.
  const Device::Current current(device_);
  absl::Status recorded = current.status();
  if (recorded.ok()) {
    recorded = device_.check(device_.driver().cuEventRecord(slot.event, stream(number)),
                             absl::StrCat("waiting for ", what_));
  }
  slot.recorded = recorded.ok();
  slot.status.Update(recorded);
  slot.poll_errors.succeeded();
  return slot.busy = true;
}

std::optional<absl::Status> KernelParts::parts_ended(size_t number) {
  Slot& slot = slots_[number];
  if (!slot.busy) return slot.status;
  absl::Status status;
  {
    const Device::Current current(device_);
    status = current.status();
    if (status.ok()) {
      const Result result = slot.recorded ? device_.driver().cuEventQuery(slot.event)
                                          : device_.driver().cuStreamQuery(stream(number));
      if (result == kNotReady) {
        slot.poll_errors.succeeded();
        return std::nullopt;
      }
      if (result != kSuccess) status = device_.check(result, absl::StrCat("waiting for ", what_));
    }
  }
  slot.status.Update(status);
  if (!status.ok() && device_.alive().ok() && !slot.poll_errors.reached()) {
    return std::nullopt;
  }
  slot.busy = false;
  slot.status.Update(device_.alive());
  if (!slot.status.ok() || !part_ended(number) || ending_ || !queue(number)) return slot.status;
  return std::nullopt;
}

}  // namespace baton::gpudirect
