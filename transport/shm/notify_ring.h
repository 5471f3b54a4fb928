// The ring that carries the arrivals of one direction, with their notifications: one sender, one
// receiver.
//
// Records are an 8-byte header (bytes, kind), an Arrival and its notification, padded to 8. Neither
// side trusts the other: the receiver checks every number it finds, and copies a payload out before
// anyone reads it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/provider.h"
#include "transport/shm/memory_file.h"

namespace baton::shm {

// The sender's end.
class RingWriter {
 public:
  explicit RingWriter(Lane& lane) : lane_(&lane) {}

  // Whether there is room now.
  bool fits(const Arrival& arrival) const;
  // Asks the receiver to say when it has made room.
  void wait_for_room() { lane_->sender_waits.store(1, std::memory_order_seq_cst); }

  // Needs fits().
  void push(const Arrival& arrival);

 private:
  void begin(size_t payload);
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

  // Whether the sender has said since the last look that it has delivered something: records, which
  // are then pending(), or counters that it raised itself.
  bool look();
  // Whether there may be records: the ring was not seen empty since.
  bool pending() const { return pending_; }
  // True if nothing is pending and look() would see nothing new.
  bool quiet() const {
    return !pending_ && lane_->activity.load(std::memory_order_seq_cst) == seen_;
  }
  // From here on the sender delivers nothing more. What it has put into the ring it has as done,
  // whether it has come to say so or not: that is pending.
  void close();

  // The next one, its notification valid until the call after it; false when there is none.
  // InvalidArgument when the sender broke the ring.
  absl::StatusOr<bool> next(Arrival& arrival);

  // True once after room was made that the sender waits for.
  bool room_was_awaited();

 private:
  void read(uint64_t at, void* to, size_t count) const;

  Lane* lane_;
  uint64_t head_ = 0;
  uint32_t seen_ = 0;  // of the sender's activity
  bool pending_ = false;
  std::string payload_;
};

}  // namespace baton::shm
