// Cuts layouts of staged transfers into chunks, and lists the runs of bytes in each.
#include "transport/internal/staging/cut.h"

#include <algorithm>
#include <numeric>

namespace baton::internal {

size_t chunk_bytes(size_t transfer_bytes) {
  // The best length grows with the root of the transfer's: two copies one after the other, of 3.5
  // us and 49 GB/s with both directions at work, make 0.4 MiB of one of 1 MiB, 3.2 MiB of one
  // of 64.
  size_t chunk = 256 << 10;
  while (chunk < StagingMessage::kMaxBytes && chunk * chunk < transfer_bytes * (168 << 10)) {
    chunk *= 2;
  }
  return chunk;
}

size_t cut(const Layout& whole, size_t begin, size_t most, Layout& out,
           std::vector<uint32_t>& index) {
  LayoutWalker walker(whole, begin);
  const size_t piece = whole.piece_bytes();
  if (walker.run() < piece || piece > most) {
    const size_t bytes = std::min(walker.run(), most);
    out = Layout::contiguous(walker.offset(), bytes);
    return begin + bytes;
  }
  // Every piece lies a multiple of this behind the layout's first byte.
  size_t stride = 0;
  for (const Dim& dim : whole.dims()) stride = std::gcd(stride, dim.stride);
  stride = std::max<size_t>(stride, 1);
  const size_t first = walker.offset();
  const size_t pieces =
      std::min({most / piece, size_t{StagingMessage::kMaxRuns}, (whole.bytes() - begin) / piece});
  index.clear();
  while (index.size() < pieces) {
    const size_t steps = (walker.offset() - whole.offset()) / stride;
    if (steps > UINT32_MAX) break;
    index.push_back(static_cast<uint32_t>(steps));
    if (index.size() < pieces) walker.advance(piece);
  }
  if (index.size() < 2) {
    out = Layout::contiguous(first, piece);
    return begin + piece;
  }
  const Dim dim{index.size(), stride, index.data()};
  out = Layout::box(whole.offset(), {&dim, 1}, piece);
  return begin + index.size() * piece;
}

size_t runs_of(const Layout& whole, size_t begin, size_t most, std::vector<Run>& out) {
  out.clear();
  LayoutWalker walker(whole, begin);
  size_t left = most;
  while (left > 0) {
    const size_t bytes = std::min(walker.run(), left);
    if (!out.empty() && out.back().offset + out.back().bytes == walker.offset()) {
      out.back().bytes += bytes;
    } else if (out.size() == StagingMessage::kMaxRuns) {
      break;
    } else {
      out.push_back({walker.offset(), bytes});
    }
    left -= bytes;
    if (left > 0) walker.advance(bytes);
  }
  return begin + most - left;
}

}  // namespace baton::internal
