// One GPU as the engine uses it: its kernels, a stream that computes, and the way to its memory.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string_view>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/model/checkpoint.h"
#include "engine/model/config.h"
#include "engine/model/model_runner.h"
#include "gpudirect/device.h"
#include "gpudirect/device_memory.h"
#include "gpudirect/kernels/image.h"
#include "gpudirect/launcher.h"
#include "gpudirect/registered_pages.h"

namespace baton::engine::device {

// Not thread-safe. What was made with it ends before it does.
class Gpu {
 public:
  // Unavailable, in one line with the remedy: no such device, a build without kernels, a device
  // that they do not run on.
  static absl::StatusOr<std::unique_ptr<Gpu>> open(
      const gpudirect::Driver& driver, int ordinal,
      absl::Span<const std::byte> image = gpudirect::kernels::image());
  ~Gpu();
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  const gpudirect::Device& device() const { return *device_; }
  const gpudirect::Launcher& launcher() const { return *launcher_; }
  // A stream of its own: peers' copies run concurrently.
  gpudirect::Stream stream() const { return stream_; }

  // Copies to the device by way of pinned memory; the bytes are there when it returns.
  absl::Status upload(gpudirect::DevicePointer to, const void* from, size_t bytes);
  // Puts a copy on the stream; to or from the host's side it is RegisteredPages.
  absl::Status copy(gpudirect::DevicePointer to, gpudirect::DevicePointer from, size_t bytes) const;
  // Wait until the stream is empty, or has come to the event, also where a call fails meanwhile:
  // for two minutes at most. Then that stays an error for good, since what still runs is unknown.
  absl::Status wait();
  // Calls `meanwhile` again and again until then.
  absl::Status wait(absl::FunctionRef<void()> meanwhile);
  absl::Status wait_for(gpudirect::Event event);
  // OK as long as steps can be computed: the device is not lost, and did not get stuck.
  absl::Status alive() const;

 private:
  Gpu() = default;
  template <typename Ask>
  absl::Status wait_until(const Ask& ask, absl::FunctionRef<void()> meanwhile);

  std::unique_ptr<gpudirect::Device> device_;
  std::unique_ptr<gpudirect::Launcher> launcher_;
  std::unique_ptr<gpudirect::RegisteredPages> stage_;
  gpudirect::Stream stream_ = nullptr;
  absl::Status stuck_;
};

// Cuts memory of a device into arrays, each aligned to 256 bytes. From base 0 it only measures.
class Carver {
 public:
  explicit Carver(gpudirect::DevicePointer base = 0) : base_(base) {}
  template <typename T>
  T* take(size_t count) {
    const size_t at = used_;
    used_ = (used_ + count * sizeof(T) + 255) / 256 * 256;
    return gpudirect::pointer_of<T>(base_ + at);
  }
  size_t used() const { return used_; }

 private:
  const gpudirect::DevicePointer base_;
  size_t used_ = 0;
};

inline gpudirect::DevicePointer address_of(const void* data) {
  return static_cast<gpudirect::DevicePointer>(reinterpret_cast<uintptr_t>(data));
}

// The value of --device, and the device that it names.

// "cpu": nothing. "cuda" and "cuda:N": the device's number. InvalidArgument for other words.
absl::StatusOr<std::optional<int>> parse_device(std::string_view text);

// A model on that device of this machine. In one line with the remedy, Unavailable: no driver, no
// such device. Unimplemented: no kernels for it.
absl::StatusOr<std::unique_ptr<ModelRunner>> run_on_device(int ordinal,
                                                           const Checkpoint& checkpoint,
                                                           Arithmetic arithmetic);

}  // namespace baton::engine::device
