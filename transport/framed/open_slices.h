// The slices that a rail has taken and not reported yet, in slots; no allocation but for the first.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "transport/provider.h"

namespace baton::framed {

struct OpenSlice {
  bool live = false;
  bool begun = false;    // bytes of it may be on their way
  bool said = false;     // writes: the last frame of it is written
  bool aborted = false;  // writes: waiting for the last word of the target
  Op op = Op::kWrite;
  const TransferDescriptor* transfer = nullptr;
  TransferId id;
  uint32_t slice = 0;
  size_t begin = 0;
  size_t end = 0;
  uint64_t order = 0;       // grows from slice to slice
  size_t framed = 0;        // bytes given to frames: sent, or asked for
  size_t received = 0;      // reads
  uint32_t reads_open = 0;  // reads: READ frames without their READ_END
  absl::Status error;       // reads: the first; writes: why this side breaks off
  size_t bytes() const { return end - begin; }
  bool urgent() const { return bytes() <= kUrgentBytes; }
};

class OpenSlices {
 public:
  static constexpr uint32_t kMostSlots = 64;
  static constexpr size_t kMaxOutstanding = 8 << 20;  // bytes of slices, beyond the first

  // `depth`: how many slices at a time, kMostSlots at most.
  explicit OpenSlices(uint32_t depth) : depth_(depth) {}

  OpenSlice* begin() { return slots_.data(); }
  OpenSlice* end() { return slots_.data() + slots_.size(); }
  const OpenSlice* begin() const { return slots_.data(); }
  const OpenSlice* end() const { return slots_.data() + slots_.size(); }

  // Null when it has to wait: every slot is taken, or enough bytes are under way.
  OpenSlice* take(const Slice& slice) {
    const size_t bytes = slice.end - slice.begin;
    if (live_ == depth_ || (live_ > 0 && outstanding_ + bytes > kMaxOutstanding)) return nullptr;
    if (slots_.empty()) slots_.resize(depth_);
    OpenSlice& slot =
        *std::find_if(begin(), end(), [](const OpenSlice& each) { return !each.live; });
    slot = OpenSlice();
    slot.live = true;
    slot.op = slice.transfer->op;
    slot.transfer = slice.transfer;
    slot.id = slice.transfer->id;
    slot.slice = slice.index;
    slot.begin = slice.begin;
    slot.end = slice.end;
    slot.order = ++order_;
    ++live_;
    outstanding_ += bytes;
    return &slot;
  }
  // How a slice ended. The slot is free before the sink hears of it.
  void report(Rail& rail, OpenSlice& slot, absl::Status status, EventSink& sink) {
    slot.live = false;
    slot.transfer = nullptr;
    --live_;
    outstanding_ -= slot.bytes();
    sink.slice_done(rail, slot.id, slot.slice, std::move(status));
  }
  OpenSlice* find(TransferId transfer, uint32_t slice, Op op) {
    OpenSlice* const it = std::find_if(begin(), end(), [&](const OpenSlice& slot) {
      return slot.live && slot.op == op && slot.id == transfer && slot.slice == slice;
    });
    return it == end() ? nullptr : it;
  }

  uint32_t live() const { return live_; }

  // Slots keep their numbers.
  OpenSlice& operator[](size_t at) { return slots_[at]; }
  uint8_t number_of(const OpenSlice& slot) const {
    return static_cast<uint8_t>(&slot - slots_.data());
  }

 private:
  std::vector<OpenSlice> slots_;  // none before the first is taken; then they stay where they are
  const uint32_t depth_;
  uint32_t live_ = 0;
  size_t outstanding_ = 0;
  uint64_t order_ = 0;
};

}  // namespace baton::framed
