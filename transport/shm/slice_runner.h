// The data path of one connection: the queue of slices, the copying, and what is told the target.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "transport/base/ring.h"
#include "transport/base/small_first.h"
#include "transport/provider.h"
#include "transport/shm/cma.h"
#include "transport/shm/device_slices.h"
#include "transport/shm/memory_file.h"
#include "transport/shm/notify_ring.h"
#include "transport/shm/peer_memory.h"

namespace baton::shm {

inline constexpr uint32_t kDepth = 64;  // slices that a rail takes at a time

class SliceRunner {
 public:
  // How much is copied between two looks at the world: bounds the time that a fence waits.
  static constexpr size_t kChunkBytes = 256 << 10;
  static constexpr size_t kChunkPieces = 2048;

  // `out` is the lane that we send on; `counters` the peer's table. All outlive the runner.
  SliceRunner(PeerMemory& peer, Lane& out, CounterTable::Word* counters, CmaBatch& cma,
              const RegionTable& regions, bool device_kernels)
      : peer_(peer),
        out_(out),
        ring_(out),
        counters_(counters),
        cma_(cma),
        regions_(regions),
        devices_(peer, out, regions, device_kernels) {}

  bool post(const Slice& slice);
  // Takes one slice of the transfer off the queue; false when there is none.
  bool take(TransferId transfer, uint32_t& slice);
  // Takes a slice off the queue; false when there is none.
  bool take_any(TransferId& transfer, uint32_t& slice);

  // As of Rail. `news`: as Result::delivered.
  bool write_now(const TransferDescriptor& write, const std::byte* from, bool& news);

  struct Result {
    bool moved = false;      // something happened
    bool delivered = false;  // the target must be told: bump activity, ring the doorbell
    bool finished = false;   // this slice has ended:
    TransferId transfer;
    uint32_t slice = 0;
    absl::Status status;
  };
  // Advances the first slice that can be by at most one chunk; takes what was copied off `budget`.
  Result step(size_t& budget);

  // Between devices: whether there is something; looks what has ended; begins nothing more of a
  // transfer; or of any, and waits for what is under way.
  bool on_devices() const { return devices_.size() != 0; }
  void settle_devices() { devices_.settle(); }
  void stop_on_devices(TransferId transfer) {
    devices_.stop(transfer, absl::CancelledError("cancelled"));
  }
  void finish_on_devices() { devices_.finish(); }
  void drop_stale_on_devices() { devices_.drop_stale(); }

  // Whether step() would do anything: nothing before the peer has the connection too.
  bool runnable() const;

 private:
  struct Active {
    Slice slice;
    std::optional<TransferCursor> cursor;
    PeerMemory::Target target;
    bool resolved = false;
  };

  using Queue = base::FixedQueue<Active, kDepth>;

  bool open() const { return open_ || (open_ = out_.open.load(std::memory_order_acquire) != 0); }
  bool runnable(const Queue& queue) const;
  Result step(Queue& queue, size_t& budget);
  absl::Status copy_chunk(Active& active, size_t& budget);
  size_t copy_mapped(Active& active, size_t limit, absl::Status& status);
  static size_t copy_mapped(Active& active, size_t limit);
  size_t copy_cma(Active& active, size_t limit, absl::Status& status);
  static Arrival arrival_of(const Slice& slice);
  bool deliver(const Slice& slice);
  bool conclude(const Slice& slice, Result& result);
  Result step_devices();

  PeerMemory& peer_;
  Lane& out_;
  RingWriter ring_;
  CounterTable::Word* counters_;
  CmaBatch& cma_;
  const RegionTable& regions_;
  mutable bool open_ = false;  // once seen
  Queue urgent_;
  Queue bulk_;
  DeviceSlices devices_;
  base::SmallFirst turns_;  // of the two
};

}  // namespace baton::shm
