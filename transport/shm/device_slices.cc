// Copies between devices, chunk by chunk.
#include "transport/shm/device_slices.h"

#include <algorithm>

namespace baton::shm {
namespace {

absl::Status taken_back() {
  return absl::NotFoundError("the remote region was deregistered by its owner during the transfer");
}

}  // namespace

void DeviceSlices::post(const Slice& slice) {
  std::unique_ptr<Item> item;
  if (spare_.empty()) {
    item = std::make_unique<Item>();
  } else {
    item = std::move(spare_.back());
    spare_.pop_back();
  }
  const TransferDescriptor& transfer = *slice.transfer;
  item->slice = slice;
  item->cursor.emplace(transfer.local, transfer.remote_layout, slice.begin, slice.end);
  item->under_way = 0;
  item->device = regions_.entries()[transfer.local_region].place.device;
  item->status = peer_.maps(item->device, transfer.remote);
  if (item->status.ok()) item->status = peer_.resolve(transfer, item->target);
  if (item->status.ok() && item->target.path != PeerMemory::Path::kDevice) {
    item->status = absl::FailedPreconditionError(
        "the remote region is not memory of a device that is mapped here");
  }
  items_.push_back(std::move(item));
}

void DeviceSlices::stop(TransferId transfer, const absl::Status& why) {
  for (const auto& item : items_) {
    if (item->slice.transfer->id == transfer) item->status.Update(why);
  }
}

void DeviceSlices::drop_stale() {
  for (const auto& item : items_) {
    const RemoteRegion& remote = item->slice.transfer->remote;
    if (item->under_way != 0 || item->target.device == nullptr ||
        peer_.live(remote.index, remote.generation)) {
      continue;
    }
    item->status.Update(taken_back());
    item->target = {};
  }
}

void DeviceSlices::settle() {
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    Copy& copy = slots_[slot];
    if (copy.item == nullptr) continue;
    std::optional<absl::Status> ended = copy.copies->ended(slot);
    if (!ended.has_value()) continue;
    copy.item->status.Update(*ended);
    --copy.item->under_way;
    copy.item = nullptr;
    out_.copying[slot].store(0, std::memory_order_release);
  }
}

absl::StatusOr<internal::DeviceCopies*> DeviceSlices::copies_of(int device) {
  std::unique_ptr<internal::DeviceCopies>& copies = copies_[device];
  if (copies == nullptr) {
    const internal::DeviceMemory* devices = internal::device_memory();
    if (devices == nullptr)
      return absl::UnimplementedError("built without CUDA support (link gpudirect)");
    absl::StatusOr<std::unique_ptr<internal::DeviceCopies>> made =
        devices->copies(device, kernels_);
    if (!made.ok()) return made.status();
    copies = *std::move(made);
  }
  return copies.get();
}

// Urgent slices go first; the last slot is kept for them.
bool DeviceSlices::begin() {
  bool any = false;
  for (const bool urgent : {true, false}) {
    for (const auto& item : items_) {
      if ((item->slice.transfer->bytes <= kUrgentBytes) != urgent) continue;
      const size_t usable = slots_.size() - (urgent ? 0 : 1);
      while (item->status.ok() && item->cursor->remaining() != 0) {
        const auto free = std::find_if(slots_.begin(), slots_.begin() + usable,
                                       [](const Copy& copy) { return copy.item == nullptr; });
        if (free == slots_.begin() + usable) break;
        item->status = begin(*item, static_cast<size_t>(free - slots_.begin()));
        any = true;
      }
    }
  }
  return any;
}

// The owner clears the row, waits until `busy` is another, and then for the marks: a copy that it
// does not see is not on the stream, and will not be.
absl::Status DeviceSlices::begin(Item& item, size_t slot) {
  const absl::StatusOr<internal::DeviceCopies*> copies = copies_of(item.device);
  if (!copies.ok()) return copies.status();
  const TransferDescriptor& transfer = *item.slice.transfer;
  const RemoteRegion& remote = transfer.remote;
  const bool write = transfer.op == Op::kWrite;
  std::byte* const far = item.target.device->data() + item.target.address;
  runs_.clear();
  Piece piece;
  size_t left = item.target.device->device() == item.device ? kChunkOnDevice : kChunkBytes;
  while (left != 0 && runs_.size() < kChunkPieces && item.cursor->next(piece, left)) {
    left -= piece.bytes;
    std::byte* const near = transfer.local_base + piece.local_offset;
    std::byte* const there = far + piece.remote_offset;
    runs_.push_back({write ? there : near, write ? near : there, piece.bytes});
  }
  out_.busy.store(remote.index + 1, std::memory_order_seq_cst);
  out_.copying[slot].store(remote.index + 1, std::memory_order_seq_cst);
  absl::Status status;
  if (!peer_.live(remote.index, remote.generation)) {
    status = taken_back();
  } else if (out_.closed.load(std::memory_order_seq_cst) != 0) {
    status = absl::UnavailableError("the peer is closing the connection");
  } else {
    status = (*copies)->begin(slot, runs_, item.target.device->reached_by_kernels(item.device));
  }
  if (status.ok()) {
    slots_[slot] = {&item, *copies};
    ++item.under_way;
  } else {
    out_.copying[slot].store(0, std::memory_order_release);
  }
  out_.busy.store(0, std::memory_order_release);
  return status;
}

DeviceSlices::Item* DeviceSlices::over() {
  for (const auto& item : items_) {
    if (item->over()) return item.get();
  }
  return nullptr;
}

void DeviceSlices::remove(Item* item) {
  const auto at = std::find_if(items_.begin(), items_.end(),
                               [&](const auto& other) { return other.get() == item; });
  item->target = {};
  spare_.push_back(std::move(*at));
  items_.erase(at);
}

void DeviceSlices::finish() {
  for (const auto& item : items_) {
    item->status.Update(absl::UnavailableError("the connection has ended"));
  }
  while (std::any_of(slots_.begin(), slots_.end(),
                     [](const Copy& copy) { return copy.item != nullptr; })) {
    settle();
  }
}

}  // namespace baton::shm
