// The data path of one connection: takes slices, copies their bytes, tells the target.
#include "transport/shm/slice_runner.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_format.h"
#include "transport/base/copies/copy_kernel.h"
#include "transport/base/copies/fault_guard.h"

namespace baton::shm {
namespace {

constexpr size_t kSmallestStreamedPiece = 512;
constexpr size_t kLookAhead = 16;  // pieces taken from the cursor at a time

// Other slices of it may go other ways, and the target adds them up; or it names no real counter;
// or the target must be able to say whether it has got it, notification and all.
bool by_record(const Slice& slice) {
  return slice.transfer->op == Op::kWrite &&
         (!slice.whole() || slice.transfer->counter.index >= CounterTable::kCapacity ||
          !slice.transfer->notify.empty());
}

}  // namespace

bool SliceRunner::post(const Slice& slice) {
  if (urgent_.size() + bulk_.size() + devices_.size() == kDepth) return false;
  if (slice.transfer->remote.kind != MemoryKind::kHost && slice.begin != slice.end) {
    devices_.post(slice);
    return true;
  }
  // Small ones pass larger ones between two chunks.
  Active& active = (slice.transfer->bytes <= kUrgentBytes ? urgent_ : bulk_).push();
  active.slice = slice;
  active.cursor.emplace(slice.transfer->local, slice.transfer->remote_layout, slice.begin,
                        slice.end);
  active.resolved = false;
  return true;
}

bool SliceRunner::take(TransferId transfer, uint32_t& slice) {
  for (Queue* queue : {&urgent_, &bulk_}) {
    for (uint32_t i = 0; i < queue->size(); ++i) {
      if ((*queue)[i].slice.transfer->id != transfer) continue;
      slice = (*queue)[i].slice.index;
      queue->remove_at(i);
      return true;
    }
  }
  return false;
}

bool SliceRunner::take_any(TransferId& transfer, uint32_t& slice) {
  if (DeviceSlices::Item* item = devices_.over(); item != nullptr) {
    transfer = item->slice.transfer->id;
    slice = item->slice.index;
    devices_.remove(item);
    return true;
  }
  Queue& queue = urgent_.empty() ? bulk_ : urgent_;
  if (queue.empty()) return false;
  transfer = queue[0].slice.transfer->id;
  slice = queue[0].slice.index;
  queue.pop();
  return true;
}

bool SliceRunner::runnable() const {
  // A copy on a device ends without an event, so poll for it.
  return open() && (devices_.size() != 0 || runnable(urgent_) || runnable(bulk_));
}

bool SliceRunner::runnable(const Queue& queue) const {
  if (queue.empty()) return false;
  const Active& first = queue[0];
  if (first.slice.begin != first.slice.end) {
    if (!first.resolved) {
      PeerMemory::Target target;
      const absl::Status status = peer_.resolve(*first.slice.transfer, target);
      return !status.ok() || target.path != PeerMemory::Path::kNotYet;
    }
    if (first.cursor->remaining() != 0) return true;
  }
  return !by_record(first.slice) || ring_.fits(arrival_of(first.slice));
}

SliceRunner::Result SliceRunner::step(size_t& budget) {
  if (!open()) return {};
  if (devices_.size() != 0) {
    Result result = step_devices();
    if (result.moved) return result;
  }
  if (turns_.large_is_due() && !bulk_.empty()) {
    const Result result = step(bulk_, budget);
    if (result.moved) return result;
  }
  const Result result = step(urgent_, budget);
  // A slice that must wait, for a mapping or for room in the ring, does not hold up others.
  return result.moved ? result : step(bulk_, budget);
}

SliceRunner::Result SliceRunner::step(Queue& queue, size_t& budget) {
  Result result;
  if (queue.empty()) return result;
  Active& active = queue[0];
  const bool empty = active.slice.begin == active.slice.end;
  if (!empty && !active.resolved) {
    result.status = peer_.resolve(*active.slice.transfer, active.target);
    if (result.status.ok() && active.target.path == PeerMemory::Path::kNotYet) return result;
    if (result.status.ok() && active.target.path == PeerMemory::Path::kDevice) {
      result.status = absl::FailedPreconditionError(
          "the remote region is device memory, but its RemoteRegion says host memory: take it from "
          "the peer again");
    }
    active.resolved = result.status.ok();
  }
  if (!empty && active.resolved && active.cursor->remaining() != 0) {
    const size_t before = budget;
    result.status = copy_chunk(active, budget);
    result.moved = true;
    if (&queue == &bulk_) {
      turns_.large_went();
    } else {
      turns_.small_went(before - budget, !bulk_.empty());
    }
    if (result.status.ok() && active.cursor->remaining() != 0) return result;
  }
  if (!conclude(active.slice, result)) return result;
  result.moved = result.finished = true;
  result.transfer = active.slice.transfer->id;
  result.slice = active.slice.index;
  queue.pop();
  return result;
}

// Tells the target of a slice whose bytes are there. False: later.
bool SliceRunner::conclude(const Slice& slice, Result& result) {
  if (result.status.ok() && slice.transfer->op == Op::kWrite) {
    const bool record = by_record(slice);
    if (record && !ring_.fits(arrival_of(slice))) {
      ring_.wait_for_room();
      // The bytes are there; the news must wait.
      if (!ring_.fits(arrival_of(slice))) return false;
    }
    // The target sets `closed` and then reads the ring to its end; we push and then look at
    // `closed`. Either the record was read, or we know that it may not have been.
    if (out_.closed.load(std::memory_order_seq_cst) != 0) {
      result.status = absl::UnavailableError("the peer is closing the connection");
    } else {
      result.delivered = deliver(slice);
      if (record && out_.closed.load(std::memory_order_seq_cst) != 0) {
        result.status = absl::UnknownError("the peer closed the connection meanwhile");
      }
    }
  }
  return true;
}

bool SliceRunner::write_now(const TransferDescriptor& write, const std::byte* from, bool& news) {
  if (!open() || write.counter.index >= CounterTable::kCapacity) return false;
  if (write.bytes != 0) {
    PeerMemory::Target target;
    if (!peer_.resolve(write, target).ok() || target.path != PeerMemory::Path::kMapped) {
      return false;
    }
    // As in copy_chunk().
    out_.busy.store(write.remote.index + 1, std::memory_order_seq_cst);
    const bool may = peer_.live(write.remote.index, write.remote.generation) &&
                     out_.closed.load(std::memory_order_seq_cst) == 0;
    if (may) std::memcpy(target.mapped + write.remote_layout.offset(), from, write.bytes);
    out_.busy.store(0, std::memory_order_release);
    if (!may) return false;
  }
  if (out_.closed.load(std::memory_order_seq_cst) != 0) return false;
  news =
      write.counter.generation != 0 &&
      CounterTable::add(counters_, write.counter.index, write.counter.generation, write.increment);
  return true;
}

SliceRunner::Result SliceRunner::step_devices() {
  Result result;
  devices_.settle();
  result.moved = devices_.begin();
  DeviceSlices::Item* const item = devices_.over();
  if (item == nullptr) return result;
  result.status = item->status;
  if (!conclude(item->slice, result)) return result;
  result.moved = result.finished = true;
  result.transfer = item->slice.transfer->id;
  result.slice = item->slice.index;
  devices_.remove(item);
  return result;
}

absl::Status SliceRunner::copy_chunk(Active& active, size_t& budget) {
  const RemoteRegion& remote = active.slice.transfer->remote;
  // The owner clears the row and then looks at `busy`; we set `busy` and then look at the row. Both
  // in the single order of seq_cst: either it waits for this chunk, or we do not begin it.
  out_.busy.store(remote.index + 1, std::memory_order_seq_cst);
  absl::Status status;
  if (!peer_.live(remote.index, remote.generation)) {
    status =
        absl::NotFoundError("the remote region was deregistered by its owner during the transfer");
  } else if (out_.closed.load(std::memory_order_seq_cst) != 0) {
    status = absl::UnavailableError("the peer is closing the connection");
  } else {
    const size_t limit = std::min(kChunkBytes, budget);
    const size_t moved = active.target.path == PeerMemory::Path::kMapped
                             ? copy_mapped(active, limit, status)
                             : copy_cma(active, limit, status);
    budget -= std::min(moved, budget);
  }
  out_.busy.store(0, std::memory_order_release);
  return status;
}

// The peer's memory is a file that cannot shrink; ours may have gone away.
size_t SliceRunner::copy_mapped(Active& active, size_t limit, absl::Status& status) {
  const TransferDescriptor& transfer = *active.slice.transfer;
  if (regions_.stays(transfer.local_region)) return copy_mapped(active, limit);
  size_t moved = limit;
  if (!base::guarded([&] { moved = copy_mapped(active, limit); })) {
    base::stream_fence();
    status = transfer.op == Op::kWrite ? base::source_is_gone() : base::target_is_gone();
  }
  return moved;
}

size_t SliceRunner::copy_mapped(Active& active, size_t limit) {
  const TransferDescriptor& transfer = *active.slice.transfer;
  const bool write = transfer.op == Op::kWrite;
  std::byte* const target = write ? active.target.mapped : transfer.local_base;
  const std::byte* const source = write ? transfer.local_base : active.target.mapped;
  const bool polled = write && transfer.polled;
  const bool stream = !polled && active.slice.end - active.slice.begin >= base::kStreamFrom;
  size_t left = limit;
  size_t pieces = 0;
  std::array<Piece, kLookAhead> batch;
  while (left != 0 && pieces < kChunkPieces) {
    size_t count = 0;
    while (count < kLookAhead && active.cursor->next(batch[count], left)) {
      left -= batch[count++].bytes;
    }
    if (count == 0) break;
    pieces += count;
    for (size_t i = 0; i < count; ++i) {
      const Piece& piece = batch[i];
      std::byte* const to = target + (write ? piece.remote_offset : piece.local_offset);
      const std::byte* const from = source + (write ? piece.local_offset : piece.remote_offset);
      if (i + 1 < count) {
        const Piece& next = batch[i + 1];
        base::prefetch_piece(source + (write ? next.local_offset : next.remote_offset), next.bytes);
      }
      if (stream && piece.bytes >= kSmallestStreamedPiece) {
        base::stream_copy(to, from, piece.bytes);
      } else if (polled) {
        base::ordered_copy(to, from, piece.bytes);
      } else {
        std::memcpy(to, from, piece.bytes);
      }
    }
  }
  if (stream) base::stream_fence();
  return limit - left;
}

size_t SliceRunner::copy_cma(Active& active, size_t limit, absl::Status& status) {
  const TransferDescriptor& transfer = *active.slice.transfer;
  size_t left = limit;
  Piece piece;
  while (left != 0 && !cma_.full() && active.cursor->next(piece, left)) {
    cma_.add(transfer.local_base + piece.local_offset, active.target.address + piece.remote_offset,
             piece.bytes);
    left -= piece.bytes;
  }
  status = cma_.run(peer_.process(), transfer.op);
  if (absl::IsPermissionDenied(status)) {  // another rail may reach the region
    peer_.lose_cma(status.message());
    status = absl::UnavailableError(status.message());
  }
  return limit - left;
}

Arrival SliceRunner::arrival_of(const Slice& slice) {
  const TransferDescriptor& transfer = *slice.transfer;
  return {.transfer = transfer.id,
          .slice = slice.index,
          .slice_bytes = slice.end - slice.begin,
          .total_bytes = transfer.bytes,
          .counter_index = transfer.counter.index,
          .counter_generation = transfer.counter.generation,
          .increment = transfer.increment,
          .notify = slice.end == transfer.bytes ? transfer.notify : std::string_view()};
}

// True when the target has news to look at.
bool SliceRunner::deliver(const Slice& slice) {
  const TransferDescriptor& transfer = *slice.transfer;
  if (by_record(slice)) {
    ring_.push(arrival_of(slice));
    return true;
  }
  return transfer.counter.generation != 0 &&
         CounterTable::add(counters_, transfer.counter.index, transfer.counter.generation,
                           transfer.increment);
}

}  // namespace baton::shm
