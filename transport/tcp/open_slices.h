// The slices that a rail has taken and not reported yet, in slots; no allocation.
//
// For rails that cut a slice into messages which the peer answers: those of tcp, and of ucx, which
// has the same frames.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "transport/provider.h"

namespace baton::tcp {

struct OpenSlice {
  bool live = false;
  bool begun = false;    // bytes of it may be on their way
  bool aborted = false;  // writes: waiting for the last word of the target
  Op op = Op::kWrite;
  const TransferDescriptor* transfer = nullptr;
  TransferId id;
  uint32_t slice = 0;
  size_t begin = 0;
  size_t end = 0;
  size_t framed = 0;        // bytes given to messages: sent, or asked for
  size_t received = 0;      // reads
  uint32_t reads_open = 0;  // reads: READ frames without their READ_END
  absl::Status error;       // reads: the first
  size_t bytes() const { return end - begin; }
  bool urgent() const { return bytes() <= kUrgentBytes; }
};

// `Slot` is an OpenSlice, or more.
template <typename Slot, uint32_t kDepth>
class OpenSlices {
 public:
  static constexpr size_t kMaxOutstanding = 8 << 20;  // bytes of slices, beyond the first

  // Null when it has to wait: every slot is taken, or enough bytes are under way.
  Slot* take(const Slice& slice) {
    const size_t bytes = slice.end - slice.begin;
    if (live_ == kDepth || (live_ > 0 && outstanding_ + bytes > kMaxOutstanding)) return nullptr;
    Slot& slot = *std::find_if(begin(), end(), [](const Slot& each) { return !each.live; });
    slot = Slot();
    slot.live = true;
    slot.op = slice.transfer->op;
    slot.transfer = slice.transfer;
    slot.id = slice.transfer->id;
    slot.slice = slice.index;
    slot.begin = slice.begin;
    slot.end = slice.end;
    ++live_;
    outstanding_ += bytes;
    return &slot;
  }
  // How a slice ended. The slot is free before the sink hears of it.
  void report(Rail& rail, Slot& slot, absl::Status status, EventSink& sink) {
    slot.live = false;
    slot.transfer = nullptr;
    --live_;
    outstanding_ -= slot.bytes();
    sink.slice_done(rail, slot.id, slot.slice, std::move(status));
  }
  Slot* find(TransferId transfer, uint32_t slice, Op op) {
    const auto it = std::find_if(begin(), end(), [&](const Slot& slot) {
      return slot.live && slot.op == op && slot.id == transfer && slot.slice == slice;
    });
    return it == end() ? nullptr : &*it;
  }

  uint32_t live() const { return live_; }
  bool aborting() const {
    return std::any_of(slots_.begin(), slots_.end(),
                       [](const Slot& slot) { return slot.live && slot.aborted; });
  }

  auto begin() { return slots_.begin(); }
  auto end() { return slots_.end(); }
  auto begin() const { return slots_.begin(); }
  auto end() const { return slots_.end(); }
  // Slots keep their numbers.
  Slot& operator[](size_t at) { return slots_[at]; }
  uint8_t number_of(const Slot& slot) const { return static_cast<uint8_t>(&slot - slots_.data()); }

 private:
  std::array<Slot, kDepth> slots_;
  uint32_t live_ = 0;
  size_t outstanding_ = 0;  // bytes of live slots
};

}  // namespace baton::tcp
