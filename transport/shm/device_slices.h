// Slices between a local device and a peer's, which is mapped here: copies on a stream, which end
// later. Only what is under way has a mark in the lane, for the peer's fence.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "transport/internal/device_memory.h"
#include "transport/provider.h"
#include "transport/shm/memory_file.h"
#include "transport/shm/peer_memory.h"

namespace baton::shm {

class DeviceSlices {
 public:
  // An engine is blind to what is urgent: 80 us of a link of 50 GB/s; within a device 45 us, and
  // each chunk costs a start.
  static constexpr size_t kChunkBytes = 4 << 20;
  static constexpr size_t kChunkOnDevice = 64 << 20;
  static constexpr size_t kChunkPieces = 4096;  // as many as a kernel takes at a time

  // `kernels`: they may copy small pieces.
  DeviceSlices(PeerMemory& peer, Lane& out, const RegionTable& regions, bool kernels)
      : peer_(peer), out_(out), regions_(regions), kernels_(kernels) {}
  ~DeviceSlices() { finish(); }

  struct Item {
    Slice slice;
    std::optional<TransferCursor> cursor;
    PeerMemory::Target target;
    int device = -1;
    uint32_t under_way = 0;
    absl::Status status;
    bool over() const { return under_way == 0 && (!status.ok() || (cursor->remaining() == 0)); }
  };

  size_t size() const { return items_.size(); }
  void post(const Slice& slice);
  // Begins nothing more of the transfer.
  void stop(TransferId transfer, const absl::Status& why);
  // Lets go of mappings of regions that their owner has taken back.
  void drop_stale();
  // Looks what has ended, and takes its marks away.
  void settle();
  // Begins what can be; true if anything was.
  bool begin();
  // A slice of which nothing moves any more; null if there is none. remove() forgets it.
  Item* over();
  void remove(Item* item);
  // Begins nothing more of any, and waits for what is under way.
  void finish();

 private:
  struct Copy {
    Item* item = nullptr;  // null: the slot is free
    internal::DeviceCopies* copies = nullptr;
  };
  absl::StatusOr<internal::DeviceCopies*> copies_of(int device);
  absl::Status begin(Item& item, size_t slot);

  PeerMemory& peer_;
  Lane& out_;
  const RegionTable& regions_;
  const bool kernels_;
  std::vector<std::unique_ptr<Item>> items_;  // in the order in which they came
  std::vector<std::unique_ptr<Item>> spare_;
  std::array<Copy, internal::DeviceCopies::kSlots> slots_;
  absl::flat_hash_map<int, std::unique_ptr<internal::DeviceCopies>> copies_;
  std::vector<internal::DeviceRun> runs_;
};

}  // namespace baton::shm
