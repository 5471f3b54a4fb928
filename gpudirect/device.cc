// Opens and closes a CUDA device.
#include "gpudirect/device.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace baton::gpudirect {

absl::StatusOr<std::unique_ptr<Device>> Device::open(const Driver& driver, int ordinal) {
  absl::StatusOr<DeviceFacts> facts = query_facts(driver, ordinal);
  if (!facts.ok()) return facts.status();
  std::unique_ptr<Device> device(new Device(driver, *std::move(facts)));
  if (absl::Status status = device->start(); !status.ok()) return status;
  return device;
}

absl::Status Device::start() {
  absl::Status status =
      check(driver_.cuDeviceGet(&handle_, facts_.ordinal), "finding the CUDA device");
  if (!status.ok()) return status;
  Context context = nullptr;
  status = check(driver_.cuDevicePrimaryCtxRetain(&context, handle_),
                 absl::StrCat("using CUDA device ", facts_.ordinal));
  if (!status.ok()) return status;
  context_ = context;
  const Current current(*this);
  status = current.status();
  // Own streams: work on the legacy stream waits for, and blocks, all others.
  for (Stream& stream : streams_) {
    if (!status.ok()) break;
    status = check(driver_.cuStreamCreateWithPriority(&stream, kStreamNonBlocking, 0),
                   "making a stream for copies");
  }
  return status;
}

Device::~Device() {
  if (context_ == nullptr) return;
  give_back([&] {
    for (const Stream stream : streams_) {
      if (stream != nullptr) driver_.cuStreamDestroy(stream);
    }
  });
  driver_.cuDevicePrimaryCtxRelease(handle_);
}

Device::Current::Current(const Device& device) : device_(device) {
  const Driver& driver = device.driver_;
  Result result = driver.cuCtxPushCurrent(device.context_);
  // It is retained, so another library has reset the device.
  if (result == kInvalidContext) result = kContextIsDestroyed;
  status_ = device.check(result, "making a GPU's context current");
  if (!status_.ok() || driver.cuThreadExchangeStreamCaptureMode == nullptr) return;
  int mode = kCaptureRelaxed;
  if (driver.cuThreadExchangeStreamCaptureMode(&mode) == kSuccess) mode_ = mode;
}

Device::Current::~Current() {
  if (!status_.ok()) return;
  const Driver& driver = device_.driver_;
  for (int attempt = 0; mode_.has_value() && attempt < 2; ++attempt) {
    int mode = *mode_;
    if (driver.cuThreadExchangeStreamCaptureMode(&mode) == kSuccess) mode_.reset();
  }
  Context popped = nullptr;
  driver.cuCtxPopCurrent(&popped);
}

absl::Status Device::check(Result result, std::string_view what) const {
  if (is_loss(result)) lost_.store(result, std::memory_order_relaxed);
  return driver_status(driver_, result, what, facts_.ordinal);
}

absl::Status Device::check_named(Result result, std::string_view what) const {
  if (!is_loss(result) || is_loss(driver_.cuStreamQuery(stream(Direction::kToHost)))) {
    return check(result, what);
  }
  return absl::FailedPreconditionError(
      absl::StrFormat("%s: it belongs to a CUDA context that is lost or destroyed (error %d); "
                      "device %d is not affected",
                      what, static_cast<int>(result), ordinal()));
}

absl::Status Device::alive() const {
  const Result lost = lost_.load(std::memory_order_relaxed);
  if (lost == kSuccess) return absl::OkStatus();
  if (lost == kNotInitialized) {
    return absl::FailedPreconditionError(
        absl::StrCat("CUDA device ", facts_.ordinal, " is the parent process's", kForked));
  }
  return absl::AbortedError(words_of_loss(facts_.ordinal));
}

}  // namespace baton::gpudirect
