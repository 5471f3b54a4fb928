// A move of a plan as the two sides of a transfer: in registered regions instead of in the buffers
// of two layouts. Connectors and agents start their transfers by it.
#pragma once

#include <cstdint>

#include "kvtransfer/kv_plan.h"
#include "transport/layout.h"
#include "transport/region.h"
#include "transport/transfer.h"

namespace baton::kvtransfer {

// A buffer of a layout, where this process has registered it.
struct KvLocalBuffer {
  MemoryRegion region;
  uint64_t offset = 0;  // where the buffer begins in the region
};
// A buffer of a layout, as a peer reaches it.
struct KvRemoteBuffer {
  RemoteRegion region;
  uint64_t offset = 0;
};

// Which buffers a move touches, for whoever starts it: a write is from the plan's source, a read
// into its target.
inline uint32_t local_buffer(Op op, const KvMove& move) {
  return op == Op::kWrite ? move.source_buffer : move.target_buffer;
}
inline uint32_t remote_buffer(Op op, const KvMove& move) {
  return op == Op::kWrite ? move.target_buffer : move.source_buffer;
}

// A layout in a buffer as one in the region that holds the buffer, `bytes` further on.
inline Layout shifted(const Layout& layout, uint64_t bytes) {
  return Layout::box(layout.offset() + bytes, layout.dims(), layout.piece_bytes());
}

// Fills in both sides of a transfer, which has these four fields.
template <typename Transfer>
void set_sides(Transfer& transfer, Op op, const KvMove& move, const KvLocalBuffer& local,
               const KvRemoteBuffer& remote) {
  const bool write = op == Op::kWrite;
  transfer.local = local.region;
  transfer.local_layout = shifted(write ? move.source : move.target, local.offset);
  transfer.remote = remote.region;
  transfer.remote_layout = shifted(write ? move.target : move.source, remote.offset);
}

}  // namespace baton::kvtransfer
