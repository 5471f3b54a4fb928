// The ring that carries the arrivals of one direction.
#include "transport/shm/notify_ring.h"

#include <algorithm>
#include <cstring>

namespace baton::shm {
namespace {

constexpr uint32_t kArrival = 2;

struct RecordHeader {
  uint32_t bytes = 0;  // of the payload
  uint32_t kind = kArrival;
};

// An Arrival as it lies in the ring.
struct ArrivalRecord {
  uint32_t transfer_slot;
  uint32_t transfer_generation;
  uint64_t slice_bytes;
  uint64_t total_bytes;
  uint64_t increment;
  uint32_t slice;
  uint32_t counter_index;
  uint32_t counter_generation;
  uint32_t reserved;
};

absl::Status broken() {
  return absl::InvalidArgumentError("the peer broke the notification ring: closing the connection");
}

constexpr size_t padded(size_t bytes) { return (bytes + 7) & ~size_t{7}; }

}  // namespace

bool RingWriter::fits(const Arrival& arrival) const {
  const uint64_t used = tail_ - lane_->head.load(std::memory_order_seq_cst);
  const size_t need = sizeof(RecordHeader) + padded(sizeof(ArrivalRecord) + arrival.notify.size());
  return used <= Lane::kRingBytes && need <= Lane::kRingBytes - used;
}

void RingWriter::begin(size_t payload) {
  const RecordHeader header{static_cast<uint32_t>(payload)};
  cursor_ = tail_;
  append(&header, sizeof header);
}

void RingWriter::append(const void* bytes, size_t count) {
  const size_t at = cursor_ % Lane::kRingBytes;
  const size_t first = std::min(count, Lane::kRingBytes - at);
  if (first != 0) std::memcpy(lane_->ring + at, bytes, first);
  if (first < count) {
    std::memcpy(lane_->ring, static_cast<const char*>(bytes) + first, count - first);
  }
  cursor_ += count;
}

void RingWriter::commit() {
  tail_ += padded(cursor_ - tail_);
  lane_->tail.store(tail_, std::memory_order_seq_cst);  // before a look at Lane::closed
}

void RingWriter::push(const Arrival& arrival) {
  const ArrivalRecord record{
      arrival.transfer.slot, arrival.transfer.generation, arrival.slice_bytes,
      arrival.total_bytes,   arrival.increment,           arrival.slice,
      arrival.counter_index, arrival.counter_generation,  0};
  begin(sizeof record + arrival.notify.size());
  append(&record, sizeof record);
  append(arrival.notify.data(), arrival.notify.size());
  commit();
}

void RingReader::read(uint64_t at, void* to, size_t count) const {
  const size_t offset = at % Lane::kRingBytes;
  const size_t first = std::min(count, Lane::kRingBytes - offset);
  if (first != 0) std::memcpy(to, lane_->ring + offset, first);
  if (first < count) std::memcpy(static_cast<char*>(to) + first, lane_->ring, count - first);
}

bool RingReader::look() {
  const uint32_t activity = lane_->activity.load(std::memory_order_seq_cst);
  if (activity == seen_) return false;
  seen_ = activity;
  pending_ = true;
  return true;
}

void RingReader::close() {
  lane_->closed.store(1, std::memory_order_seq_cst);
  pending_ = true;
}

absl::StatusOr<bool> RingReader::next(Arrival& arrival) {
  const uint64_t available = lane_->tail.load(std::memory_order_seq_cst) - head_;
  pending_ = available != 0;
  if (!pending_) return false;
  if (available > Lane::kRingBytes || available < sizeof(RecordHeader)) return broken();
  RecordHeader header;
  read(head_, &header, sizeof header);
  const uint64_t start = head_ + sizeof header;
  if (padded(header.bytes) > available - sizeof header) return broken();

  ArrivalRecord raw{};
  if (header.kind != kArrival || header.bytes < sizeof raw) return broken();
  const size_t notify = header.bytes - sizeof raw;
  read(start, &raw, sizeof raw);
  if (raw.counter_generation > UINT16_MAX || notify > kMaxNotification) return broken();
  payload_.resize(notify);
  read(start + sizeof raw, payload_.data(), notify);
  arrival = {.transfer = {raw.transfer_slot, raw.transfer_generation},
             .slice = raw.slice,
             .slice_bytes = raw.slice_bytes,
             .total_bytes = raw.total_bytes,
             .counter_index = raw.counter_index,
             .counter_generation = static_cast<uint16_t>(raw.counter_generation),
             .increment = raw.increment,
             .notify = payload_};
  head_ = start + padded(header.bytes);
  lane_->head.store(head_, std::memory_order_seq_cst);
  return true;
}

bool RingReader::room_was_awaited() {
  return lane_->sender_waits.load(std::memory_order_seq_cst) != 0 &&
         lane_->sender_waits.exchange(0, std::memory_order_seq_cst) != 0;
}

}  // namespace baton::shm
