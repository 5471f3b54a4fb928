// Cuts layouts into chunks: a chunk lies contiguously in a staging ring, so each side of a transfer
// is cut by itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "transport/internal/messages/control_message.h"
#include "transport/layout.h"

namespace baton::internal {

// How long the chunks of a transfer are: short ones let its three stages overlap, long ones cost
// less each.
size_t chunk_bytes(size_t transfer_bytes);

// The layout of bytes [begin, end) of `whole`, as one of its own: whole pieces of it, or part of
// one. Takes at most `most` bytes and StagingMessage::kMaxRuns pieces; returns the end. `index` is
// borrowed by `out`.
size_t cut(const Layout& whole, size_t begin, size_t most, Layout& out,
           std::vector<uint32_t>& index);

// Where bytes [begin, begin + most) of `whole` lie, neighbours merged, in at most
// StagingMessage::kMaxRuns runs; returns the end.
size_t runs_of(const Layout& whole, size_t begin, size_t most, std::vector<Run>& out);

}  // namespace baton::internal
