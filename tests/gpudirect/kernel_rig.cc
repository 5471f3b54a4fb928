// Memory, copies and times for kernels on a device.
#include "tests/gpudirect/kernel_rig.h"

#include <algorithm>
#include <chrono>
#include <limits>

#include "absl/strings/str_format.h"
#include "transport/clock.h"

namespace baton::gpudirect {

absl::StatusOr<std::unique_ptr<KernelRig>> KernelRig::make(const Device& device, size_t bytes) {
  std::unique_ptr<KernelRig> rig(new KernelRig(device));
  if (absl::Status status = rig->start(bytes); !status.ok()) return status;
  return rig;
}

absl::Status KernelRig::start(size_t bytes) {
  auto slab = DeviceSlab::create(device_, bytes, {.rdma = false, .shareable = false});
  if (!slab.ok()) return slab.status();
  slab_ = *std::move(slab);
  auto stage = RegisteredPages::make(device_, kStage);
  if (!stage.ok()) return stage.status();
  stage_ = *std::move(stage);
  return absl::OkStatus();
}

DevicePointer KernelRig::allocate(size_t bytes) {
  const size_t at = used_;
  used_ = (used_ + bytes + 255) / 256 * 256;
  // Beyond the slab the driver refuses the copy.
  return slab_->span().data + at;
}

absl::Status KernelRig::upload(DevicePointer to, const void* from, size_t bytes) {
  const Device::Current current(device_);
  absl::Status status = current.status();
  const DevicePointer stage = stage_->address();
  for (size_t at = 0; at < bytes && status.ok(); at += kStage) {
    const size_t size = std::min(kStage, bytes - at);
    std::memcpy(stage_->as<std::byte>(), static_cast<const std::byte*>(from) + at, size);
    status =
        device_.check(device_.driver().cuMemcpyAsync(to + at, stage, size, stream()), "a copy");
    if (status.ok()) status = wait();
  }
  return status;
}

absl::Status KernelRig::download(void* to, DevicePointer from, size_t bytes) {
  const Device::Current current(device_);
  absl::Status status = current.status();
  const DevicePointer stage = stage_->address();
  for (size_t at = 0; at < bytes && status.ok(); at += kStage) {
    const size_t size = std::min(kStage, bytes - at);
    status =
        device_.check(device_.driver().cuMemcpyAsync(stage, from + at, size, stream()), "a copy");
    if (status.ok()) status = wait();
    if (status.ok()) std::memcpy(static_cast<std::byte*>(to) + at, stage_->as<std::byte>(), size);
  }
  return status;
}

absl::Status KernelRig::wait() const {
  const Device::Current current(device_);
  const auto begin = std::chrono::steady_clock::now();
  for (;;) {
    const Result result = device_.driver().cuStreamQuery(stream());
    if (result != kNotReady) return device_.check(result, "waiting for a kernel");
    // The fake runs a kernel while it is asked, which takes as long as the machine is slow.
    const auto most = patient(std::chrono::seconds(10));
    if (std::chrono::steady_clock::now() - begin > most) {
      return absl::DeadlineExceededError(
          absl::StrFormat("a kernel has not ended in %d s", most.count()));
    }
  }
}

absl::StatusOr<double> KernelRig::time(int repeats,
                                       const std::function<absl::Status()>& queue) const {
  const Device::Current current(device_);
  double least = std::numeric_limits<double>::infinity();
  for (int round = 0; round < 4; ++round) {  // the first warms up
    const auto begin = std::chrono::steady_clock::now();
    absl::Status status;
    for (int i = 0; i < repeats && status.ok(); ++i) status = queue();
    if (status.ok()) status = wait();
    if (!status.ok()) return status;
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
    if (round > 0) least = std::min(least, took.count() / repeats);
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
