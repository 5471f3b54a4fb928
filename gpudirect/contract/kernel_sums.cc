// Copies to the device, a kernel, and a copy back, on a stream; an event behind each part.
#include "gpudirect/contract/kernel_sums.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace baton::gpudirect {
namespace {

using Sum = internal::VectorSum;

// A driver that answers so often with an error, and never that the sum is over, has lost it.
constexpr uint32_t kMostErrorsOfASum = 1000;

static_assert(kernels::kMaxSources == internal::VectorSums::kMostSources);

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
  return made;
}

absl::Status KernelSums::start() {
  auto slab = DeviceSlab::create(device_, kSlots * kShare, {.rdma = false, .shareable = false});
  if (!slab.ok()) return slab.status();
  slab_ = *std::move(slab);
  auto bounce = RegisteredPages::make(device_, kSlots * kShare);
  if (!bounce.ok()) return bounce.status();
  bounce_ = *std::move(bounce);
  const Device::Current current(device_);
  absl::Status status = current.status();
  for (Stream& stream : streams_) {
    if (!status.ok()) break;
    Stream made = nullptr;
    status =
        device_.check(device_.driver().cuStreamCreateWithPriority(&made, kStreamNonBlocking, 0),
                      "making a stream for sums");
    if (status.ok()) stream = made;
  }
  for (Slot& slot : slots_) {
    if (!status.ok()) break;
    Event event = nullptr;
    status = device_.check(device_.driver().cuEventCreate(&event, kEventDisableTiming),
                           "making an event for sums");
    if (status.ok()) slot.event = event;
    slot.sources.reserve(kMostSources);
  }
  return status;
}

KernelSums::~KernelSums() {
  for (size_t slot = 0; slot < kSlots; ++slot) {
    while (slots_[slot].busy) {
      slots_[slot].sum.count = 0;  // no part behind this one
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
    for (const Pin& pin : pins_) {
      if (pin.ours) device_.driver().cuMemHostUnregister(pin.memory.data());
    }
  });
}

absl::Status KernelSums::pin(absl::Span<std::byte> memory) {
  const Device::Current current(device_);
  if (!current.status().ok()) return current.status();
  const auto facts = query_pointer(device_.driver(), vector_address(memory.data()));
  const bool ours = !facts.ok() || !facts->pinned;
  absl::Status status;
  if (ours) {
    status = device_.check(device_.driver().cuMemHostRegister(memory.data(), memory.size(),
                                                              kHostPortable | kHostDeviceMap),
                           absl::StrFormat("pinning %u bytes of the host for sums", memory.size()));
  }
  if (status.ok()) pins_.push_back({memory, ours});
  return status;
}

bool KernelSums::pinned(const std::byte* at, size_t bytes) const {
  return std::any_of(pins_.begin(), pins_.end(), [&](const Pin& pin) {
    return at >= pin.memory.data() && at + bytes <= pin.memory.data() + pin.memory.size();
  });
}

absl::Status KernelSums::begin(size_t number, const Sum& sum) {
  if (absl::Status status = device_.alive(); !status.ok()) return status;
  Slot& slot = slots_[number];
  slot.sum = sum;
  slot.sources.assign(sum.sources.begin(), sum.sources.end());
  slot.sum.sources = slot.sources;
  slot.done = slot.part = 0;
  slot.status = absl::OkStatus();
  if (sum.count == 0 || queue_part(number)) return absl::OkStatus();
  return slot.status;
}

bool KernelSums::queue_part(size_t number) {
  Slot& slot = slots_[number];
  bool any = false;
  slot.status.Update(queue_part(number, any));
  if (!any) return false;
  // Part of it may be on its way also after an error.
  const Device::Current current(device_);
  absl::Status recorded = current.status();
  if (recorded.ok()) {
    recorded = device_.check(device_.driver().cuEventRecord(slot.event, stream(number)),
                             "waiting for a sum");
  }
  slot.recorded = recorded.ok();
  slot.status.Update(recorded);
  slot.errors = 0;
  return slot.busy = true;
}

absl::Status KernelSums::queue_part(size_t number, bool& any) {
  Slot& slot = slots_[number];
  const Sum& sum = slot.sum;
  const Driver& driver = device_.driver();
  const Device::Current current(device_);
  if (!current.status().ok()) return current.status();
  const size_t element = bytes_of(sum.element);
  const size_t room = room_of(sum);
  slot.part = std::min(sum.count - slot.done, room / element);
  const size_t from = slot.done * element, bytes = slot.part * element;
  const DevicePointer slab = slab_->span().data + number * kShare;
  const auto queued = [&](Result result) {
    any |= result == kSuccess;
    return device_.check(
        result, absl::StrFormat("summing %u bytes on CUDA device %d", bytes, device_.ordinal()));
  };

  kernels::ReduceSum arguments{.count = slot.part,
                               .source_count = static_cast<uint32_t>(slot.sources.size()),
                               .divide_by = sum.divide_by,
                               .element = static_cast<kernels::SumElement>(sum.element),
                               .operation = static_cast<kernels::SumOperation>(sum.operation)};
  size_t at = 0;  // in the shares
  for (size_t i = 0; i < slot.sources.size(); ++i) {
    const std::byte* source = slot.sources[i].data + from;
    if (slot.sources[i].on_device) {
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
  slot.target_pinned = sum.target_on_device || pinned(target, bytes);
  if (sum.target_on_device) return absl::OkStatus();
  if (!slot.target_pinned) target = pinned_share(number) + at;
  return queued(driver.cuMemcpyAsync(vector_address(target), slab + at, bytes, stream(number)));
}

std::optional<absl::Status> KernelSums::ended(size_t number) {
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
      status = device_.check(result, "waiting for a sum");
    }
  }
  slot.status.Update(status);
  if (!status.ok() && device_.alive().ok() && ++slot.errors < kMostErrorsOfASum) {
    return std::nullopt;
  }
  slot.busy = false;
  slot.status.Update(device_.alive());
  if (!slot.status.ok()) return slot.status;
  const size_t element = bytes_of(slot.sum.element);
  if (!slot.target_pinned) {
    const size_t at = of_the_host(slot.sources) * room_of(slot.sum);
    std::memcpy(slot.sum.target + slot.done * element, pinned_share(number) + at,
                slot.part * element);
  }
  slot.done += slot.part;
  if (slot.done >= slot.sum.count || !queue_part(number)) return slot.status;
  return std::nullopt;
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
