// Steps that come again and again, each recorded once as a CUDA graph: a step of decoding is
// hundreds of small kernels, and a launch of its graph is one call.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gpudirect/stream_graph.h"

namespace baton::engine::device {

// What the launches of a step follow from, but for what they read in the device's memory.
struct StepShape {
  uint32_t tokens = 0;  // one of each sequence
  bool draws = false;
  bool joins = false;  // some context has several splits
  bool tells = false;  // of layers
  const void* cache = nullptr;
  // A false alarm of clang-tidy: it takes the zero that a default compares with for a pointer.
  friend auto operator<=>(const StepShape&,
                          const StepShape&) = default;  // NOLINT(modernize-use-nullptr)
};

class StepGraphs {
 public:
  // How many are kept: those that were used last.
  static constexpr size_t kMost = 48;

  // The graph of such steps: recorded when the second one comes, by what `queue` puts on the
  // stream. Null for the first one, which has no shape yet.
  absl::StatusOr<const gpudirect::StreamGraph*> of(const gpudirect::Device& device,
                                                   gpudirect::Stream stream, const StepShape& shape,
                                                   absl::FunctionRef<absl::Status()> queue);
  // When none of them runs any more.
  void clear() { graphs_.clear(); }
  uint64_t recorded() const { return recorded_; }

 private:
  struct Kept {
    std::unique_ptr<gpudirect::StreamGraph> graph;
    uint64_t used = 0;
  };
  std::map<StepShape, Kept> graphs_;
  uint64_t steps_ = 0;
  uint64_t recorded_ = 0;
};

}  // namespace baton::engine::device
