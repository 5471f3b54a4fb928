// Launches this program's kernels on a device.
//
// All are loaded when the launcher is made: loading later would wait for what runs on the device,
// and hold up every other thread's copies meanwhile.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "gpudirect/device.h"
#include "gpudirect/kernels/arguments.h"
#include "gpudirect/kernels/image.h"

namespace baton::gpudirect {

// Thread-safe but for its end. The device outlives it, and nothing that it launched runs any more.
class Launcher {
 public:
  // Unimplemented: this build has no kernels, or none for this device; with the remedy.
  static absl::StatusOr<std::unique_ptr<Launcher>> load(
      const Device& device, absl::Span<const std::byte> image = kernels::image());
  ~Launcher();
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  const Device& device() const { return device_; }
  // One call for each kernel: launcher.reduce_sum(arguments, blocks, stream). Every kernel does all
  // its work with any number of blocks; a launch has at least one, and no more than the device can
  // hold at once. The arguments are copied; the memory that they point to must stay until the
  // kernel has run. A call neither waits nor allocates. The device's context must be current
  // (Device::Current).
#define BATON_LAUNCH(kernel, Arguments, threads)                                                   \
  absl::Status kernel(const kernels::Arguments& arguments, uint64_t blocks, Stream stream) const { \
    return launch(k_##kernel, &arguments, blocks, stream);                                         \
  }
  BATON_KERNELS(BATON_LAUNCH)
#undef BATON_LAUNCH

  // A product by the kernel for its number of rows: in fp32, and with a rounded to bf16, which more
  // than kernels::kFewRows rows have room for at `rounded`.
  absl::Status multiply(const kernels::Gemm& product, Stream stream) const;
  absl::Status multiply_bf16(const kernels::Gemm& product, Stream stream) const;
  // A split of each item, by the kernel for the group's size.
  absl::Status attend(const kernels::SplitAttention& splits, uint64_t blocks, Stream stream) const;

 private:
#define BATON_NUMBER(kernel, Arguments, threads) k_##kernel,
  enum Number : uint8_t { BATON_KERNELS(BATON_NUMBER) kCount };
#undef BATON_NUMBER

  explicit Launcher(const Device& device) : device_(device) {}
  absl::Status find_all();
  absl::Status launch(Number kernel, const void* arguments, uint64_t blocks, Stream stream) const;

  const Device& device_;
  Module module_ = nullptr;
  std::array<Function, kCount> functions_{};
  std::array<uint64_t, kCount> most_blocks_{};  // in a launch
};

// Work of a stream that is recorded once and launched many times, as a CUDA graph: the host makes
// one call for all of its kernels and copies.
//
// Addresses and counts are those of the recording; what is to differ lies in memory that the
// kernels read. The host hears of the middle of a launch by words that kernels write
// (layer_tickets.h): events that were recorded in a graph say nothing of its launches.

class StreamGraph {
 public:
  // OK, or Unavailable with the driver that it takes.
  static absl::Status possible(const Device& device);

  // Records what `queue` puts on the stream, which is this thread's alone meanwhile; none of it
  // runs. `queue` must not wait for a stream or query one. If it or the driver fails, the stream is
  // as it was before. The device outlives the graph, and so does the memory that it uses.
  static absl::StatusOr<std::unique_ptr<StreamGraph>> record(
      const Device& device, Stream stream, absl::FunctionRef<absl::Status()> queue);
  // When none of its launches runs any more.
  ~StreamGraph();
  StreamGraph(const StreamGraph&) = delete;
  StreamGraph& operator=(const StreamGraph&) = delete;

  // Behind what is on the stream. The device's context is current.
  absl::Status launch(Stream stream) const;

 private:
  explicit StreamGraph(const Device& device) : device_(device) {}

  const Device& device_;
  GraphExecutable executable_ = nullptr;
};

}  // namespace baton::gpudirect
