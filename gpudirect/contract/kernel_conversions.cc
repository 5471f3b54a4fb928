// A copy of boxes, and a launch for each form of rows among them; an event behind each part.
#include "gpudirect/contract/kernel_conversions.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace baton::gpudirect {
namespace {

using internal::RowBox;

// A driver that answers so often with an error, and never that it is over, has lost the conversion.
constexpr uint32_t kMostErrorsOfAConversion = 1000;
constexpr size_t kShare = KernelConversions::kShareBoxes * sizeof(kernels::RowBox);

uint32_t rows_of(const RowBox& box) { return box.count[0] * box.count[1] * box.count[2]; }

kernels::RowBox for_kernel(const RowBox& box) {
  kernels::RowBox out{.from = box.from, .to = box.to, .scales = box.scales};
  for (size_t d = 0; d < box.count.size(); ++d) {
    out.count[d] = box.count[d];
    out.from_stride[d] = box.from_stride[d];
    out.to_stride[d] = box.to_stride[d];
    out.scale_stride[d] = box.scale_stride[d];
  }
  return out;
}

}  // namespace

absl::StatusOr<std::unique_ptr<KernelConversions>> KernelConversions::create(
    const Device& device, const Launcher& launcher) {
  if (absl::Status status = device.alive(); !status.ok()) return status;
  std::unique_ptr<KernelConversions> made(new KernelConversions(device, launcher));
  if (absl::Status status = made->start(); !status.ok()) return status;
  return made;
}

absl::Status KernelConversions::start() {
  auto slab = DeviceSlab::create(device_, kSlots * kShare, {.rdma = false, .shareable = false});
  if (!slab.ok()) return slab.status();
  slab_ = *std::move(slab);
  auto pages = RegisteredPages::make(device_, kSlots * kShare);
  if (!pages.ok()) return pages.status();
  pages_ = *std::move(pages);
  const Device::Current current(device_);
  absl::Status status = current.status();
  for (Stream& stream : streams_) {
    if (!status.ok()) break;
    Stream made = nullptr;
    status =
        device_.check(device_.driver().cuStreamCreateWithPriority(&made, kStreamNonBlocking, 0),
                      "making a stream for conversions");
    if (status.ok()) stream = made;
  }
  for (Slot& slot : slots_) {
    if (!status.ok()) break;
    Event event = nullptr;
    status = device_.check(device_.driver().cuEventCreate(&event, kEventDisableTiming),
                           "making an event for conversions");
    if (status.ok()) slot.event = event;
  }
  return status;
}

KernelConversions::~KernelConversions() {
  for (size_t slot = 0; slot < kSlots; ++slot) {
    while (slots_[slot].busy) {
      slots_[slot].done = slots_[slot].boxes.size();  // no part behind this one
      ended(slot);
    }
  }
  device_.give_back([&] {
    for (const Slot& slot : slots_) {
      if (slot.event != nullptr) device_.driver().cuEventDestroy(slot.event);
    }
    for (const Stream stream : streams_) {
      if (stream != nullptr) device_.driver().cuStreamDestroy(stream);
    }
  });
}

absl::Status KernelConversions::begin(size_t number, absl::Span<const RowBox> boxes) {
  if (absl::Status status = device_.alive(); !status.ok()) return status;
  Slot& slot = slots_[number];
  slot.boxes.assign(boxes.begin(), boxes.end());
  // A launch goes over as many rows for each box as its largest has: those of one size together.
  std::sort(slot.boxes.begin(), slot.boxes.end(), [](const RowBox& a, const RowBox& b) {
    return std::pair(a.form, rows_of(a)) < std::pair(b.form, rows_of(b));
  });
  slot.done = 0;
  slot.status = absl::OkStatus();
  if (boxes.empty() || queue_part(number)) return absl::OkStatus();
  return slot.status;
}

bool KernelConversions::queue_part(size_t number) {
  Slot& slot = slots_[number];
  bool any = false;
  slot.status.Update(queue_part(number, any));
  if (!any) return false;
  // Part of it may be on its way also after an error.
  const Device::Current current(device_);
  absl::Status recorded = current.status();
  if (recorded.ok()) {
    recorded = device_.check(device_.driver().cuEventRecord(slot.event, stream(number)),
                             "waiting for a conversion");
  }
  slot.recorded = recorded.ok();
  slot.status.Update(recorded);
  slot.errors = 0;
  return slot.busy = true;
}

absl::Status KernelConversions::queue_part(size_t number, bool& any) {
  Slot& slot = slots_[number];
  const Device::Current current(device_);
  if (!current.status().ok()) return current.status();
  const size_t end = std::min(slot.boxes.size(), slot.done + kShareBoxes);
  const auto part = absl::MakeConstSpan(slot.boxes).subspan(slot.done, end - slot.done);
  slot.done = end;
  const auto queued = [&](absl::Status status) {
    any |= status.ok();
    if (status.ok()) return status;
    return absl::Status(status.code(), absl::StrCat("converting rows on CUDA device ",
                                                    device_.ordinal(), ": ", status.message()));
  };
  auto* const host = pages_->as<kernels::RowBox>() + number * kShareBoxes;
  std::transform(part.begin(), part.end(), host, for_kernel);
  const DevicePointer boxes = slab_->span().data + number * kShare;
  absl::Status status = queued(device_.check(
      device_.driver().cuMemcpyAsync(boxes, reinterpret_cast<uintptr_t>(host),
                                     part.size() * sizeof(kernels::RowBox), stream(number)),
      "copying where they lie"));
  for (size_t first = 0, next; status.ok() && first < part.size(); first = next) {
    const RowBox::Form& form = part[first].form;
    next = first + 1;
    while (next < part.size() && part[next].form == form) ++next;
    const kernels::Reshard arguments{
        .boxes = pointer_of<const kernels::RowBox>(boxes + first * sizeof(kernels::RowBox)),
        .count = static_cast<uint32_t>(next - first),
        .rows = rows_of(part[next - 1]),
        .elements = form.elements,
        .span = form.span,
        .conversion =
            form.is_fp32 ? kernels::Conversion::kF32ToFp8E4m3 : kernels::Conversion::kBf16ToFp8E4m3,
        .from_element = form.from_element,
        .to_element = form.to_element,
        .scale_element = form.scale_element};
    status =
        queued(launcher_.reshard(arguments, kernels::reshard_blocks(arguments), stream(number)));
  }
  return status;
}

std::optional<absl::Status> KernelConversions::ended(size_t number) {
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
        slot.errors = 0;
        return std::nullopt;
      }
      status = device_.check(result, "waiting for a conversion");
    }
  }
  slot.status.Update(status);
  if (!status.ok() && device_.alive().ok() && ++slot.errors < kMostErrorsOfAConversion) {
    return std::nullopt;
  }
  slot.busy = false;
  slot.status.Update(device_.alive());
  if (!slot.status.ok()) return slot.status;
  if (slot.done == slot.boxes.size() || !queue_part(number)) return slot.status;
  return std::nullopt;
}

}  // namespace baton::gpudirect
