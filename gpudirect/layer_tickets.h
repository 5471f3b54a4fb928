// Tells the host which layers of a step a stream has finished, also when a CUDA graph replays it.
//
//   capture:  tickets.begin(stream); for each layer { ...its kernels...; tickets.mark(stream, l); }
//   replay:   launch the graph; the host polls, and submits the transfer of each layer that is
//   ready.
//
// A step has a number that the device itself counts, so a replay needs no call of the host's but
// its launch. A layer is told once, while its step is the current one. One that was not marked
// when the next step begins, or was not polled for until then, is an error: its blocks may hold the
// next step's data. So a graph is launched again when the transfers of the layers have ended
// (TransferRequest::release holds its stream until then).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gpudirect/device.h"
#include "gpudirect/device_memory.h"
#include "gpudirect/launcher.h"
#include "gpudirect/registered_pages.h"

namespace baton::gpudirect {

// begin() and mark() for one thread at a time, poll() for another.
class LayerTickets {
 public:
  // Both outlive it. Unavailable where the device does not know the host's addresses;
  // ResourceExhausted for more layers than the host has memory to tell of (16 bytes each).
  static absl::StatusOr<std::unique_ptr<LayerTickets>> open(const Device& device,
                                                            const Launcher& launcher,
                                                            uint32_t layers);
  // It ends when nothing that was put on a stream, or into a graph, will run any more.

  // A step begins on the stream: a kernel of one thread.
  absl::Status begin(Stream stream) const;
  // All that is on the stream before this, in this step, belongs to the layer or came before it.
  // InvalidArgument for a layer that there is not.
  absl::Status mark(Stream stream, uint32_t layer) const;

  // Calls `ready` for each layer of the current step that was marked since, in their order, and
  // returns how many there were. The first step has the number 1. DataLoss, naming step and layers,
  // when a step has begun though layers of the one before were not told; the next call goes on with
  // the new step. Aborted when the device is lost: no layer will come any more. Once in many calls
  // that find nothing the driver is asked for that, which takes a microsecond.
  absl::StatusOr<size_t> poll(absl::FunctionRef<void(uint64_t step, uint32_t layer)> ready);
  // No caller wants to hear of the layers of steps until now any more: one failed, and the streams
  // are empty.
  void forget_steps();

 private:
  LayerTickets(const Device& device, const Launcher& launcher, uint32_t layers)
      : device_(device), launcher_(launcher), layers_(layers) {}
  absl::Status start();
  absl::Status launch(Stream stream, uint32_t word, uint64_t add) const;
  absl::Status look_for_loss();

  const Device& device_;
  const Launcher& launcher_;
  const uint32_t layers_;
  std::unique_ptr<RegisteredPages> pages_;  // the step that has begun, then each layer's last
  std::unique_ptr<DeviceSlab> count_;       // the device's own count of steps
  uint64_t step_ = 0;
  std::vector<uint64_t> told_;  // of each layer, the last step that was told
  uint32_t fruitless_ = 0;      // polls
};

}  // namespace baton::gpudirect
