// Opens a GPU for computing, copies to it and waits for it.
#include "engine/device/gpu.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <thread>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "engine/device/device_model.h"
#include "gpudirect/driver.h"
#include "transport/clock.h"

namespace baton::engine::device {
namespace {

using gpudirect::Device;
using gpudirect::DevicePointer;
using gpudirect::Result;

constexpr size_t kStage = 4 << 20;
// How the engine's thread waits: it asks so often, then sleeps between its questions.
constexpr int kSpins = 2000;
constexpr std::chrono::microseconds kNap{20};
constexpr int kMostErrors = 100;  // of its questions

}  // namespace

absl::StatusOr<std::unique_ptr<Gpu>> Gpu::open(const gpudirect::Driver& driver, int ordinal,
                                               absl::Span<const std::byte> image) {
  std::unique_ptr<Gpu> gpu(new Gpu);
  auto device = Device::open(driver, ordinal);
  if (!device.ok()) return device.status();
  gpu->device_ = *std::move(device);
  auto launcher = gpudirect::Launcher::load(*gpu->device_, image);
  if (!launcher.ok()) return launcher.status();
  gpu->launcher_ = *std::move(launcher);
  auto stage = gpudirect::RegisteredPages::make(*gpu->device_, kStage);
  if (!stage.ok()) return stage.status();
  gpu->stage_ = *std::move(stage);
  const Device::Current current(*gpu->device_);
  absl::Status status = current.status();
  if (status.ok()) {
    status = gpu->device_->check(
        driver.cuStreamCreateWithPriority(&gpu->stream_, gpudirect::kStreamNonBlocking, 0),
        "making a stream that computes");
  }
  if (!status.ok()) {
    gpu->stream_ = nullptr;
    return status;
  }
  return gpu;
}

Gpu::~Gpu() {
  if (stream_ == nullptr) return;
  wait().IgnoreError();
  device_->give_back([this] { device_->driver().cuStreamDestroy(stream_); });
}

absl::Status Gpu::copy(DevicePointer to, DevicePointer from, size_t bytes) const {
  if (bytes == 0) return absl::OkStatus();
  const Device::Current current(*device_);
  if (!current.status().ok()) return current.status();
  return device_->check(device_->driver().cuMemcpyAsync(to, from, bytes, stream_), "a copy");
}

absl::Status Gpu::upload(DevicePointer to, const void* from, size_t bytes) {
  absl::Status status;
  for (size_t at = 0; at < bytes && status.ok(); at += kStage) {
    const size_t some = std::min(kStage, bytes - at);
    std::memcpy(stage_->as<std::byte>(), static_cast<const std::byte*>(from) + at, some);
    status = copy(to + at, stage_->address(), some);
    if (status.ok()) status = wait();
  }
  return status;
}

template <typename Ask>
absl::Status Gpu::wait_until(const Ask& ask, absl::FunctionRef<void()> meanwhile) {
  if (!stuck_.ok()) return stuck_;
  absl::Status failed;
  std::optional<Device::Current> current;
  for (int attempt = 0; attempt < 2; ++attempt) {
    current.emplace(*device_);
    if (current->status().ok()) break;
    failed.Update(current->status());
  }
  if (!current->status().ok()) return failed;
  const auto until = std::chrono::steady_clock::now() + patient(std::chrono::seconds(120));
  for (int asked = 0, errors = 0;; ++asked) {
    const Result result = ask();
    if (result == gpudirect::kSuccess) return failed;
    if (result != gpudirect::kNotReady) {
      // A failed query tells nothing about the work: it may be running.
      failed.Update(device_->check(result, "computing"));
      if (!device_->alive().ok()) return failed;
      if (++errors == kMostErrors) return stuck_ = failed;
      continue;
    }
    meanwhile();
    if (asked < kSpins) continue;
    std::this_thread::sleep_for(kNap);
    if (std::chrono::steady_clock::now() < until) continue;
    stuck_ =
        absl::AbortedError("the GPU has not ended a step in two minutes: restart this process");
    return stuck_;
  }
}

absl::Status Gpu::wait(absl::FunctionRef<void()> meanwhile) {
  return wait_until([this] { return device_->driver().cuStreamQuery(stream_); }, meanwhile);
}

absl::Status Gpu::alive() const { return stuck_.ok() ? device_->alive() : stuck_; }

absl::Status Gpu::wait() {
  return wait([] {});
}

absl::Status Gpu::wait_for(gpudirect::Event event) {
  return wait_until([&] { return device_->driver().cuEventQuery(event); }, [] {});
}

absl::StatusOr<std::optional<int>> parse_device(std::string_view text) {
  if (text == "cpu") return std::nullopt;
  if (text == "cuda") return 0;
  absl::string_view number(text.data(), text.size());
  int ordinal = 0;
  // As it would be written, to the letter: SimpleAtoi() takes spaces, signs and zeros as well.
  if (absl::ConsumePrefix(&number, "cuda:") && absl::SimpleAtoi(number, &ordinal) && ordinal >= 0 &&
      ordinal < 1024 && absl::StrCat(ordinal) == number) {
    return ordinal;
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "\"", absl::Utf8SafeCEscape(std::string(text)),
      "\" is not a device: write cpu, cuda, or cuda: with a device's number behind it, as "
      "in cuda:1"));
}

absl::StatusOr<std::unique_ptr<ModelRunner>> run_on_device(int ordinal,
                                                           const Checkpoint& checkpoint,
                                                           Arithmetic arithmetic) {
  const auto failed = [&](const absl::Status& status) {
    return absl::Status(status.code(), absl::StrCat("--device cuda:", ordinal, ": ",
                                                    status.message(), "; --device cpu needs none"));
  };
  const absl::StatusOr<const gpudirect::Driver*> driver = gpudirect::machine_driver();
  if (!driver.ok()) return failed(driver.status());
  absl::StatusOr<std::unique_ptr<Gpu>> gpu = Gpu::open(**driver, ordinal);
  if (!gpu.ok()) return failed(gpu.status());
  absl::StatusOr<const gpudirect::CublasLt*> blas = absl::UnavailableError("it is not needed");
  if (arithmetic == Arithmetic::kBf16) blas = gpudirect::machine_cublaslt();
  auto model = DeviceModel::create(*std::move(gpu), checkpoint, arithmetic, blas);
  if (!model.ok()) return failed(model.status());
  const char* const graphs = std::getenv("BATON_CUDA_GRAPHS");
  const std::string_view wanted = graphs != nullptr ? graphs : "yes";
  if (wanted != "yes" && wanted != "no") {
    return absl::InvalidArgumentError(
        absl::StrCat("BATON_CUDA_GRAPHS is \"", graphs, "\": write yes or no"));
  }
  (*model)->use_graphs(wanted == "yes");
  return *std::move(model);
}

}  // namespace baton::engine::device
