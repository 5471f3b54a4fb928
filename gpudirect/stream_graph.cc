// Records a stream into a CUDA graph.
#include "gpudirect/stream_graph.h"

namespace baton::gpudirect {

absl::Status StreamGraph::possible(const Device& device) {
  const Driver& driver = device.driver();
  if (driver.cuStreamBeginCapture != nullptr && driver.cuStreamEndCapture != nullptr &&
      driver.cuGraphInstantiateWithFlags != nullptr && driver.cuGraphLaunch != nullptr &&
      driver.cuGraphExecDestroy != nullptr && driver.cuGraphDestroy != nullptr) {
    return absl::OkStatus();
  }
  return absl::UnavailableError(
      "this driver lacks the CUDA graphs that Baton needs: install one for CUDA 11.4 or newer");
}

absl::StatusOr<std::unique_ptr<StreamGraph>> StreamGraph::record(
    const Device& device, Stream stream, absl::FunctionRef<absl::Status()> queue) {
  if (absl::Status status = possible(device); !status.ok()) return status;
  const Device::Current current(device);
  if (!current.status().ok()) return current.status();
  const Driver& driver = device.driver();
  absl::Status status = device.check(driver.cuStreamBeginCapture(stream, kCaptureThreadLocal),
                                     "recording a CUDA graph");
  if (!status.ok()) return status;
  status = queue();
  Graph graph = nullptr;
  // Also of what failed: the stream would go on recording.
  const Result ended = driver.cuStreamEndCapture(stream, &graph);
  if (status.ok()) status = device.check(ended, "ending the recording of a CUDA graph");
  std::unique_ptr<StreamGraph> out(new StreamGraph(device));
  if (status.ok()) {
    const Result made = driver.cuGraphInstantiateWithFlags(&out->executable_, graph, 0);
    if (made != kSuccess) out->executable_ = nullptr;
    status = device.check(made, "making a CUDA graph ready");
  }
  if (graph != nullptr) device.give_back([&] { driver.cuGraphDestroy(graph); });
  if (!status.ok()) return status;
  return out;
}

StreamGraph::~StreamGraph() {
  if (executable_ == nullptr) return;
  device_.give_back([&] { device_.driver().cuGraphExecDestroy(executable_); });
}

absl::Status StreamGraph::launch(Stream stream) const {
  return device_.check(device_.driver().cuGraphLaunch(executable_, stream),
                       "launching a CUDA graph");
}

}  // namespace baton::gpudirect
