// Copies to the device, a kernel, and a copy back.
#include "gpudirect/contract/kernel_sums.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "gpudirect/contract/staging.h"

namespace baton::gpudirect {
namespace {

using Sum = internal::VectorSum;

static_assert(kernels::kMaxSources == internal::VectorSums::kMostSources);

constexpr const char* kOfSum = "a sum";  // for texts

constexpr size_t bytes_of(Sum::Element element) {
  constexpr std::array<size_t, kernels::kSumElements> kSizes = {4, 2, 2, 8, 1, 1, 4, 8};
  return kSizes[static_cast<size_t>(element)];
}

DevicePointer vector_address(const std::byte* data) { return reinterpret_cast<uintptr_t>(data); }

size_t of_the_host(absl::Span<const Sum::Source> sources) {
  return static_cast<size_t>(std::count_if(
      sources.begin(), sources.end(), [](const Sum::Source& source) { return !source.on_device; }));
}

// Bytes of a vector that go at a time: whole lines, and as many as fit into a slot's share beside
// those of the others that lie there. All of it where none does.
size_t room_of(const Sum& sum) {
  const size_t vectors = of_the_host(sum.sources) + (sum.target_on_device ? 0 : 1);
  return vectors == 0 ? SIZE_MAX : KernelSums::kShare / vectors / 256 * 256;
}

}  // namespace

absl::StatusOr<std::unique_ptr<KernelSums>> KernelSums::create(const Device& device,
                                                               const Launcher& launcher,
                                                               const CopyTable& copies,
                                                               const SumCosts& sums) {
  if (absl::Status status = device.alive(); !status.ok()) return status;
  std::unique_ptr<KernelSums> made(new KernelSums(device, launcher, copies, sums));
  if (absl::Status status = made->start(); !status.ok()) return status;
  for (Work& work : made->work_) work.sources.reserve(kMostSources);
  return made;
}

absl::Status KernelSums::start() {
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
                      "making a stream for a sum");
    if (status.ok()) stream = made;
  }
  for (Work& work : work_) {
    if (status.ok()) status = work.slot.make(device_, kOfSum);
  }
  return status;
}

// All ends before the pins do.
KernelSums::~KernelSums() {
  ending_ = true;  // no part follows those on their way
  for (size_t slot = 0; slot < kSlots; ++slot) {
    while (work_[slot].slot.busy) ended(slot);
  }
  device_.give_back([&] {
    for (const Work& work : work_) {
      if (work.slot.event != nullptr) device_.driver().cuEventDestroy(work.slot.event);
    }
    for (const Stream stream : streams_) {
      if (stream != nullptr) device_.driver().cuStreamDestroy(stream);
    }
  });
}

absl::Status KernelSums::pin(absl::Span<std::byte> memory) {
  auto pin = pin_host(device_, memory);
  if (!pin.ok()) return pin.status();
  pins_.emplace_back(memory, *std::move(pin));
  return absl::OkStatus();
}

bool KernelSums::pinned(const std::byte* at, size_t bytes) const {
  return std::any_of(pins_.begin(), pins_.end(), [&](const auto& pin) {
    return at >= pin.first.data() && at + bytes <= pin.first.data() + pin.first.size();
  });
}

absl::Status KernelSums::begin(size_t number, const Sum& sum) {
  if (absl::Status status = device_.alive(); !status.ok()) return status;
  Work& work = work_[number];
  work.sum = sum;
  work.sources.assign(sum.sources.begin(), sum.sources.end());
  work.sum.sources = work.sources;
  work.done = work.part = 0;
  work.slot.status = absl::OkStatus();
  return sum.count == 0 || queue(number) ? absl::OkStatus() : work.slot.status;
}

bool KernelSums::queue(size_t number) {
  StreamSlot& slot = work_[number].slot;
  bool any = false;
  slot.status.Update(queue_part(number, any));
  if (!any) return false;
  // Part of it may be on its way also after an error.
  const Device::Current current(device_);
  slot.record(device_, stream(number), kOfSum, current.status());
  return true;
}

std::optional<absl::Status> KernelSums::ended(size_t number) {
  StreamSlot& slot = work_[number].slot;
  if (!slot.busy) return slot.status;
  if (!slot.over(device_, stream(number), kOfSum)) return std::nullopt;
  if (!slot.status.ok() || !part_ended(number) || ending_ || !queue(number)) return slot.status;
  return std::nullopt;
}

absl::Status KernelSums::queue_part(size_t number, bool& any) {
  Work& work = work_[number];
  const Sum& sum = work.sum;
  const Driver& driver = device_.driver();
  const Device::Current current(device_);
  if (!current.status().ok()) return current.status();
  const size_t element = bytes_of(sum.element);
  const size_t room = room_of(sum);
  work.part = std::min(sum.count - work.done, room / element);
  const size_t from = work.done * element, bytes = work.part * element;
  const DevicePointer slab = slab_->span().data + number * kShare;
  const auto queued = [&](Result result) {
    any |= result == kSuccess;
    return device_.check(
        result, absl::StrFormat("summing %u bytes on CUDA device %d", bytes, device_.ordinal()));
  };

  kernels::ReduceSum arguments{.count = work.part,
                               .source_count = static_cast<uint32_t>(work.sources.size()),
                               .divide_by = sum.divide_by,
                               .element = static_cast<kernels::SumElement>(sum.element),
                               .operation = static_cast<kernels::SumOperation>(sum.operation)};
  size_t at = 0;  // in the shares
  for (size_t i = 0; i < work.sources.size(); ++i) {
    const std::byte* source = work.sources[i].data + from;
    if (work.sources[i].on_device) {
      arguments.sources[i] = source;
      continue;
    }
    if (!pinned(source, bytes)) {
      std::memcpy(pinned_share(number) + at, source, bytes);
      source = pinned_share(number) + at;
    }
    absl::Status status =
        queued(driver.cuMemcpyAsync(slab + at, vector_address(source), bytes, stream(number)));
    if (!status.ok()) return status;
    arguments.sources[i] = pointer_of<const void>(slab + at);
    at += room;
  }
  std::byte* target = sum.target + from;
  arguments.target = sum.target_on_device ? target : pointer_of<void>(slab + at);
  absl::Status status = launcher_.reduce_sum(arguments, sum_blocks(bytes), stream(number));
  any |= status.ok();
  if (!status.ok()) {
    return absl::Status(status.code(), absl::StrCat("summing ", bytes, " bytes on CUDA device ",
                                                    device_.ordinal(), ": ", status.message()));
  }
  work.target_pinned = sum.target_on_device || pinned(target, bytes);
  if (sum.target_on_device) return absl::OkStatus();
  if (!work.target_pinned) target = pinned_share(number) + at;
  return queued(driver.cuMemcpyAsync(vector_address(target), slab + at, bytes, stream(number)));
}

bool KernelSums::part_ended(size_t number) {
  Work& work = work_[number];
  if (!work.target_pinned) {
    const size_t element = bytes_of(work.sum.element);
    const size_t at = of_the_host(work.sources) * room_of(work.sum);
    std::memcpy(work.sum.target + work.done * element, pinned_share(number) + at,
                work.part * element);
  }
  work.done += work.part;
  return work.done < work.sum.count;
}

double KernelSums::seconds(const Sum& sum) const {
  if (sum.count == 0) return 0;
  const auto type = static_cast<size_t>(sum.element);
  const size_t all = sum.count * bytes_of(sum.element);
  const size_t host = of_the_host(sum.sources);
  const size_t longest = std::min(all, room_of(sum));
  const size_t parts = (all + longest - 1) / longest;
  const auto one_part = [&](size_t bytes) {
    const auto copy = [&](CopyRoute route) {
      return copies_.nanoseconds(route, CopyWay::kSingle, 1, bytes);
    };
    return static_cast<double>(host) * copy(CopyRoute::kToDevice) + costs_.start[type] +
           static_cast<double>(sum.sources.size() * bytes) * costs_.byte[type] +
           (sum.target_on_device ? 0 : copy(CopyRoute::kToHost));
  };
  const auto loose = [&](const std::byte* at) { return at != nullptr && !pinned(at, all); };
  size_t bounced = !sum.target_on_device && loose(sum.target) ? all : 0;
  for (const Sum::Source& source : sum.sources) {
    if (!source.on_device && loose(source.data)) bounced += all;
  }
  const double nanoseconds = static_cast<double>(parts - 1) * one_part(longest) +
                             one_part(all - (parts - 1) * longest) +
                             static_cast<double>(bounced) * costs_.host_copy;
  return nanoseconds * 1e-9;
}

}  // namespace baton::gpudirect
