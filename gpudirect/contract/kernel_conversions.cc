// A copy of boxes, and a launch for each form of rows among them.
#include "gpudirect/contract/kernel_conversions.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace baton::gpudirect {
namespace {

using internal::RowBox;

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
  if (absl::Status status = made->start(kSlots, kShare); !status.ok()) return status;
  return made;
}

absl::Status KernelConversions::begin(size_t number, absl::Span<const RowBox> boxes) {
  if (absl::Status status = device_.alive(); !status.ok()) return status;
  Boxes& slot = boxes_[number];
  slot.all.assign(boxes.begin(), boxes.end());
  // A launch goes over as many rows for each box as its largest has: those of one size together.
  std::sort(slot.all.begin(), slot.all.end(), [](const RowBox& a, const RowBox& b) {
    return std::pair(a.form, rows_of(a)) < std::pair(b.form, rows_of(b));
  });
  slot.done = 0;
  return begin_parts(number, !boxes.empty());
}

absl::Status KernelConversions::queue_part(size_t number, bool& any) {
  Boxes& slot = boxes_[number];
  const Device::Current current(device_);
  if (!current.status().ok()) return current.status();
  const size_t end = std::min(slot.all.size(), slot.done + kShareBoxes);
  const auto part = absl::MakeConstSpan(slot.all).subspan(slot.done, end - slot.done);
  slot.done = end;
  const auto queued = [&](absl::Status status) {
    any |= status.ok();
    if (status.ok()) return status;
    return absl::Status(status.code(), absl::StrCat("converting rows on CUDA device ",
                                                    device_.ordinal(), ": ", status.message()));
  };
  auto* const host = reinterpret_cast<kernels::RowBox*>(pinned_share(number));
  std::transform(part.begin(), part.end(), host, for_kernel);
  const DevicePointer boxes = device_share(number);
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

}  // namespace baton::gpudirect
