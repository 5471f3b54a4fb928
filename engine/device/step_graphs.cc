// Which steps have a graph, and which graph goes for another one.
#include "engine/device/step_graphs.h"

#include <algorithm>

namespace baton::engine::device {

absl::StatusOr<const gpudirect::StreamGraph*> StepGraphs::of(
    const gpudirect::Device& device, gpudirect::Stream stream, const StepShape& shape,
    absl::FunctionRef<absl::Status()> queue) {
  const auto [at, first] = graphs_.try_emplace(shape);
  at->second.used = ++steps_;
  if (first) {
    // Nothing of a graph runs between two steps.
    if (graphs_.size() > kMost) {
      graphs_.erase(std::min_element(
          graphs_.begin(), graphs_.end(),
          [](const auto& a, const auto& b) { return a.second.used < b.second.used; }));
    }
    return nullptr;
  }
  if (at->second.graph == nullptr) {
    auto graph = gpudirect::StreamGraph::record(device, stream, queue);
    if (!graph.ok()) return graph.status();
    at->second.graph = *std::move(graph);
    ++recorded_;
  }
  return at->second.graph.get();
}

}  // namespace baton::engine::device
