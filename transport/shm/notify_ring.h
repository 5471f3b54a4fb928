// The ring that carries notifications and arrivals of one direction: one sender, one receiver.
//
// Records are an 8-byte header (bytes, kind) and a payload, padded to 8. Neither side trusts the
// other: the receiver checks every number it finds, and copies a payload out before anyone reads
// it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/provider.h"
#include "transport/shm/segment.h"

namespace baton::shm {

enum class RecordKind : uint32_t {
  kNotification = 1,  // the payload
  kArrival = 2,       // an Arrival, then its notification
};

// The sender's end.
class RingWriter {
 public:
  explicit RingWriter(Lane& lane) : lane_(&lane) {}

  // Whether a record of `payload` bytes fits now; never true for one larger than the ring.
  bool fits(size_t payload) const;
  // Asks the receiver to say when it has made room.
  void wait_for_room() { lane_->sender_waits.store(1, std::memory_order_seq_cst); }

  // Both need fits(): push() of payload.size(), push_arrival() of arrival_bytes(arrival).
  void push(std::string_view payload);
  void push_arrival(const Arrival& arrival);
  static size_t arrival_bytes(const Arrival& arrival);

 private:
  void begin(RecordKind kind, size_t payload);
  void append(const void* bytes, size_t count);
  void commit();

  Lane* lane_;
  uint64_t tail_ = 0;    // as published
  uint64_t cursor_ = 0;  // of the record being written
};

// The receiver's end.
class RingReader {
 public:
  explicit RingReader(Lane& lane) : lane_(&lane) {}

  struct Record {
    RecordKind kind = RecordKind::kNotification;
    Arrival arrival;          // of kArrival; its notify is empty
    std::string_view notify;  // valid until the next call
  };
  // The next record; false when there is none. InvalidArgument when the sender broke the ring.
  absl::StatusOr<bool> next(Record& record);

  // True once after room was made that the sender waits for.
  bool room_was_awaited();

 private:
  void read(uint64_t at, void* to, size_t count) const;

  Lane* lane_;
  uint64_t head_ = 0;
  std::string payload_;
};

}  // namespace baton::shm
