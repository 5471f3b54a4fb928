// Work of a stream that is recorded once and launched many times, as a CUDA graph: the host makes
// one call for all of its kernels and copies.
//
// Addresses and counts are those of the recording; what is to differ lies in memory that the
// kernels read. The host hears of the middle of a launch by words that kernels write
// (layer_tickets.h): events that were recorded in a graph say nothing of its launches.
#pragma once

#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gpudirect/device.h"

namespace baton::gpudirect {

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
