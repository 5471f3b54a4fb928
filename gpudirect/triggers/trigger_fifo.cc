// The host's end of the queue of triggers, and its memory.
#include "gpudirect/triggers/trigger_fifo.h"

#include <atomic>
#include <bit>

#include "absl/strings/str_cat.h"

namespace baton::gpudirect {
namespace {

constexpr size_t kPublishEvery = 16;        // triggers between two writes of the tail
constexpr size_t kLine = 16;                // words
constexpr size_t kDeviceWords = 4 * kLine;  // head, granted, seen tail, looking

}  // namespace

TriggerConsumer::TriggerConsumer(absl::Span<uint64_t> slots, uint64_t& tail)
    : slots_(slots), tail_(tail) {}

uint32_t TriggerConsumer::prepare(uint32_t pieces) {
  prepared_.push_back({pieces, 0});
  return static_cast<uint32_t>(prepared_.size() - 1);
}

absl::StatusOr<uint32_t> TriggerConsumer::renew(uint32_t transfer) {
  if (transfer >= prepared_.size()) {
    return absl::NotFoundError(
        absl::StrCat("transfer ", transfer, " of ", prepared_.size(), ": it was not prepared"));
  }
  Prepared& row = prepared_[transfer];
  row.epoch = (row.epoch + 1) & 0x7fffffffu;
  return row.epoch;
}

void TriggerConsumer::withdraw(uint32_t transfer) {
  if (transfer < prepared_.size()) prepared_[transfer].withdrawn = true;
}

absl::Status TriggerConsumer::check(const Trigger& trigger) const {
  if (trigger.transfer >= prepared_.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("a kernel asks for transfer ", trigger.transfer, " of ", prepared_.size()));
  }
  const Prepared& row = prepared_[trigger.transfer];
  if (row.withdrawn) {
    return absl::InvalidArgumentError(absl::StrCat("a kernel asks for transfer ", trigger.transfer,
                                                   ", which is no longer served"));
  }
  if (trigger.count == 0 || trigger.first > row.pieces ||
      trigger.count > row.pieces - trigger.first) {
    return absl::InvalidArgumentError(absl::StrCat("a kernel asks for ", trigger.count,
                                                   " pieces from ", trigger.first, " on of ",
                                                   row.pieces));
  }
  if (trigger.epoch != row.epoch) {
    return absl::InvalidArgumentError(absl::StrCat("a kernel asks for epoch ", trigger.epoch,
                                                   " of a transfer that is in ", row.epoch));
  }
  return absl::OkStatus();
}

bool TriggerConsumer::admits(const Trigger& trigger) {
  absl::Status status = check(trigger);
  if (status.ok()) return true;
  ++refused_;
  last_refusal_ = std::move(status);
  return false;
}

void TriggerConsumer::publish() {
  std::atomic_ref(tail_).store(taken_ | (closed_ ? kernels::TriggerQueue::kClosed : 0),
                               std::memory_order_release);
}

void TriggerConsumer::close() {
  closed_ = true;
  publish();
}

size_t TriggerConsumer::take(size_t most, absl::FunctionRef<void(const Trigger&)> start) {
  const size_t capacity = slots_.size() / 2;
  size_t count = 0;
  for (; count < most; ++count) {
    uint64_t* const slot = &slots_[2 * (taken_ & (capacity - 1))];
    const uint64_t first = std::atomic_ref(slot[0]).load(std::memory_order_acquire);
    const uint64_t second = std::atomic_ref(slot[1]).load(std::memory_order_acquire);
    const uint64_t lap = (taken_ / capacity & 1) ^ 1;
    if ((first >> 31 & 1) != lap || (second >> 32 & 1) != lap) break;
    const Trigger trigger{static_cast<uint32_t>(first & 0x7fffffffu),
                          static_cast<uint32_t>(first >> 32), static_cast<uint32_t>(second),
                          static_cast<uint32_t>(second >> 33)};
    ++taken_;
    if ((count + 1) % kPublishEvery == 0) publish();
    if (admits(trigger)) start(trigger);
  }
  if (count > 0) publish();
  return count;
}

absl::StatusOr<std::unique_ptr<TriggerFifo>> TriggerFifo::open(const Device& device,
                                                               uint32_t capacity) {
  if (!std::has_single_bit(capacity) || capacity > kMostSlots) {
    return absl::InvalidArgumentError(absl::StrCat("a queue of ", capacity,
                                                   " triggers: it must be a power of two, and ",
                                                   kMostSlots, " at most"));
  }
  if (!device.facts().has(kCanUseHostPointerForRegisteredMemory)) {
    return absl::UnavailableError(
        "this CUDA device does not know registered host memory by the host's address: kernels "
        "cannot ask for transfers there");
  }
  std::unique_ptr<TriggerFifo> fifo(new TriggerFifo(device, capacity));
  if (absl::Status status = fifo->start(); !status.ok()) return status;
  return fifo;
}

absl::Status TriggerFifo::start() {
  const Device::Current current(device_);
  if (!current.status().ok()) return current.status();
  auto pages = RegisteredPages::make(device_, (size_t{2} * capacity_ + 16) * sizeof(uint64_t));
  if (!pages.ok()) return pages.status();
  pages_ = *std::move(pages);
  auto words = DeviceSlab::create(device_, kDeviceWords * sizeof(uint64_t),
                                  {.rdma = false, .shareable = false});
  if (!words.ok()) return words.status();
  words_ = *std::move(words);
  consumer_ =
      std::make_unique<TriggerConsumer>(absl::MakeSpan(slots(), size_t{2} * capacity_), *tail());
  return pages_->copy_to(words_->span().data, kDeviceWords * sizeof(uint64_t));  // zeros
}

kernels::TriggerQueue TriggerFifo::device_handle() const {
  uint64_t* const words = pointer_of<uint64_t>(words_->span().data);
  return {.slots = slots(),
          .tail = tail(),
          .head = words,
          .granted = words + kLine,
          .seen_tail = words + 2 * kLine,
          .looking = words + 3 * kLine,
          .capacity = capacity_};
}

}  // namespace baton::gpudirect
