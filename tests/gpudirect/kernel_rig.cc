// Memory, copies and times for kernels on a device.
#include "tests/gpudirect/kernel_rig.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_format.h"

namespace baton::gpudirect {

KernelRig::KernelRig(const Device& device, size_t bytes)
    : device_(device),
      slab_(must(DeviceSlab::create(device, bytes, {.rdma = false, .shareable = false}))),
      stage_(must(RegisteredPages::make(device, kStage))) {}

DevicePointer KernelRig::allocate(size_t bytes) {
  const size_t at = used_;
  used_ = (used_ + bytes + 255) / 256 * 256;
  // Beyond the slab the driver refuses the copy.
  return slab_->span().data + at;
}

void KernelRig::upload(DevicePointer to, const void* from, size_t bytes) {
  const Device::Current current(device_);
  must(current.status());
  for (size_t at = 0; at < bytes; at += kStage) {
    const size_t size = std::min(kStage, bytes - at);
    std::memcpy(stage_->as<std::byte>(), static_cast<const std::byte*>(from) + at, size);
    must(device_.check(device_.driver().cuMemcpyAsync(to + at, stage_->address(), size, stream()),
                       "a copy"));
    wait();
  }
}

void KernelRig::download(void* to, DevicePointer from, size_t bytes) {
  const Device::Current current(device_);
  must(current.status());
  for (size_t at = 0; at < bytes; at += kStage) {
    const size_t size = std::min(kStage, bytes - at);
    must(device_.check(device_.driver().cuMemcpyAsync(stage_->address(), from + at, size, stream()),
                       "a copy"));
    wait();
    std::memcpy(static_cast<std::byte*>(to) + at, stage_->as<std::byte>(), size);
  }
}

double KernelRig::time(int repeats, const std::function<absl::Status()>& queue) const {
  const Device::Current current(device_);
  double least = std::numeric_limits<double>::infinity();
  for (int round = 0; round < 4; ++round) {  // the first warms up
    const double begin = rig_now();
    for (int i = 0; i < repeats; ++i) must(queue());
    wait();
    if (round > 0) least = std::min(least, (rig_now() - begin) * 1e6 / repeats);
  }
  return least;
}

std::string json_of(const KernelRow& row) {
  std::string out = absl::StrFormat(
      R"({"name": "%s", "shape": "%s", "us": %.2f, "GB/s": %.1f, "of_copy": %.3f, "TFLOP/s": %.2f)",
      row.name, row.shape, row.microseconds, row.gigabytes_per_second, row.of_copy, row.teraflops);
  if (row.of_floor > 0) absl::StrAppendFormat(&out, R"(, "of_floor": %.3f)", row.of_floor);
  if (row.goal > 0) {
    const bool floor = row.of_floor > 0;
    absl::StrAppendFormat(&out, R"(, "goal": "%s >= %.2f", "met": %s)",
                          floor ? "of_floor" : "of_copy", row.goal,
                          (floor ? row.of_floor : row.of_copy) >= row.goal ? "true" : "false");
  }
  return out + "}";
}

}  // namespace baton::gpudirect
