// A queue from kernels to the host: a running kernel asks for transfers to be started.
//
// A slot names a transfer that the host has prepared, a range of its pieces, and the epoch that it
// was prepared in. It holds no address: whatever a kernel writes there, nothing outside prepared
// transfers moves. Who pushes is in kernels/trigger-inl.h; a full queue says so, and who waits for
// a place waits no longer than it was told, nor once the queue is closed.
//
// Only push_trigger() may write there. A kernel that writes past its own memory into the slots can
// make the host take what no kernel pushed: each is checked as any other, but host and kernels no
// longer agree where the queue is. What is pushed from then on is accepted, and neither started nor
// refused: such a queue is lost, and is to be opened anew when that kernel has been fixed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "gpudirect/device.h"
#include "gpudirect/device_memory.h"
#include "gpudirect/kernels/arguments.h"
#include "gpudirect/registered_pages.h"

namespace baton::gpudirect {

using kernels::Trigger;

// The host's end, over words that are given. For one thread.
class TriggerConsumer {
 public:
  // Two words for each slot, a power of two of slots, zero; `tail`: one word, zero. They outlive
  // it.
  TriggerConsumer(absl::Span<uint64_t> slots, uint64_t& tail);

  // A transfer of so many pieces: its number, for triggers; below 2^31 - 1. Its epoch is 0.
  uint32_t prepare(uint32_t pieces);
  // From now on triggers of the epochs before are refused: the transfer may stand for other memory.
  // Returns the new epoch; NotFound where no such transfer was prepared. Of one that take() has
  // handed out already, admits() says so.
  absl::StatusOr<uint32_t> renew(uint32_t transfer);

  // From now on every trigger of it is refused.
  void withdraw(uint32_t transfer);
  // How many were prepared: the number that the next one gets.
  uint32_t prepared() const { return static_cast<uint32_t>(prepared_.size()); }

  // Hands out what has been pushed, in its order, up to `most`; returns how many it took. Refused
  // are triggers that name no prepared transfer, pieces that it has not, none, or another epoch.
  size_t take(size_t most, absl::FunctionRef<void(const Trigger&)> start);
  // Kernels push nothing any more, and wait no longer, once one of them has found the queue full
  // from now on. What they have pushed is there to be taken.
  void close();
  // Whether one that was handed out may still be started; counts it as refused if not.
  bool admits(const Trigger& trigger);
  uint64_t refused() const { return refused_; }
  // Why the last was refused: InvalidArgument; OK where none was.
  const absl::Status& last_refusal() const { return last_refusal_; }

 private:
  struct Prepared {
    uint32_t pieces = 0;
    uint32_t epoch = 0;
    bool withdrawn = false;
  };
  absl::Status check(const Trigger& trigger) const;
  void publish();

  const absl::Span<uint64_t> slots_;
  uint64_t& tail_;
  uint64_t taken_ = 0;
  bool closed_ = false;
  std::vector<Prepared> prepared_;
  uint64_t refused_ = 0;
  absl::Status last_refusal_;
};

// The queue on a device: slots and tail in host memory that it reads and writes, the counts of
// pushers in its own.
class TriggerFifo {
 public:
  // `capacity`: a power of two, kMostSlots at most; each takes 16 bytes of pinned memory, and the
  // queue one granule of the device's (2 MiB). Waits for one small copy, a second at most. The
  // device outlives it.
  static constexpr uint32_t kMostSlots = 1 << 20;
  static absl::StatusOr<std::unique_ptr<TriggerFifo>> open(const Device& device,
                                                           uint32_t capacity = 512);
  // It ends when no kernel that has the handle runs any more: one that pushes later touches what is
  // no memory any more, and the device is lost.

  // For kernels' arguments; by value.
  kernels::TriggerQueue device_handle() const;
  TriggerConsumer& consumer() { return *consumer_; }

 private:
  TriggerFifo(const Device& device, uint32_t capacity) : device_(device), capacity_(capacity) {}
  absl::Status start();
  uint64_t* slots() const { return pages_->as<uint64_t>(); }
  uint64_t* tail() const { return slots() + size_t{2} * capacity_ + 8; }

  const Device& device_;
  const uint32_t capacity_;
  std::unique_ptr<RegisteredPages> pages_;  // the slots, and the tail a line away from them
  std::unique_ptr<DeviceSlab> words_;       // of kernels: head, granted, seen tail
  std::unique_ptr<TriggerConsumer> consumer_;
};

}  // namespace baton::gpudirect
