// The ring that carries notifications and arrivals of one direction.
#include "transport/shm/notify_ring.h"

#include <algorithm>
#include <cstring>

namespace baton::shm {
namespace {

struct RecordHeader {
  uint32_t bytes = 0;  // of the payload
  RecordKind kind = RecordKind::kNotification;
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

bool RingWriter::fits(size_t payload) const {
  const uint64_t used = tail_ - lane_->head.load(std::memory_order_seq_cst);
  const size_t need = sizeof(RecordHeader) + padded(payload);
  return used <= Lane::kRingBytes && need <= Lane::kRingBytes - used;
}

void RingWriter::begin(RecordKind kind, size_t payload) {
  const RecordHeader header{static_cast<uint32_t>(payload), kind};
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
  lane_->tail.store(tail_, std::memory_order_release);
}

void RingWriter::push(std::string_view payload) {
  begin(RecordKind::kNotification, payload.size());
  append(payload.data(), payload.size());
  commit();
}

size_t RingWriter::arrival_bytes(const Arrival& arrival) {
  return sizeof(ArrivalRecord) + arrival.notify.size();
}

void RingWriter::push_arrival(const Arrival& arrival) {
  const ArrivalRecord record{
      arrival.transfer.slot, arrival.transfer.generation, arrival.slice_bytes,
      arrival.total_bytes,   arrival.increment,           arrival.slice,
      arrival.counter_index, arrival.counter_generation,  0};
  begin(RecordKind::kArrival, arrival_bytes(arrival));
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

absl::StatusOr<bool> RingReader::next(Record& record) {
  const uint64_t available = lane_->tail.load(std::memory_order_acquire) - head_;
  if (available == 0) return false;
  if (available > Lane::kRingBytes || available < sizeof(RecordHeader)) return broken();
  RecordHeader header;
  read(head_, &header, sizeof header);
  const uint64_t start = head_ + sizeof header;
  if (padded(header.bytes) > available - sizeof header) return broken();

  size_t skip = 0;
  if (header.kind == RecordKind::kArrival) {
    ArrivalRecord raw{};
    if (header.bytes < sizeof raw) return broken();
    read(start, &raw, sizeof raw);
    if (raw.counter_generation > UINT16_MAX) return broken();
    skip = sizeof raw;
    record.arrival = {.transfer = {raw.transfer_slot, raw.transfer_generation},
                      .slice = raw.slice,
                      .slice_bytes = raw.slice_bytes,
                      .total_bytes = raw.total_bytes,
                      .counter_index = raw.counter_index,
                      .counter_generation = static_cast<uint16_t>(raw.counter_generation),
                      .increment = raw.increment,
                      .notify = {}};
  } else if (header.kind != RecordKind::kNotification) {
    return broken();
  }
  if (header.bytes - skip > kMaxNotification) return broken();
  record.kind = header.kind;
  payload_.resize(header.bytes - skip);
  read(start + skip, payload_.data(), payload_.size());
  record.notify = payload_;
  head_ = start + padded(header.bytes);
  lane_->head.store(head_, std::memory_order_seq_cst);
  return true;
}

bool RingReader::room_was_awaited() {
  return lane_->sender_waits.load(std::memory_order_seq_cst) != 0 &&
         lane_->sender_waits.exchange(0, std::memory_order_seq_cst) != 0;
}

}  // namespace baton::shm
