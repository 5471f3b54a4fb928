// When an acknowledgement of a small write may wait for data that goes the same way.
//
// A system call for itself costs as much as the data did. Where data has followed acknowledgements
// at once again and again, the next ones are held for it: for a few rounds of progress and some
// microseconds at most, as long as a thread calls progress(). Each time none came, more of them
// have to be followed by data before one is held again: the peer hears late now and then, not
// always.
//
// Where no caller waits for acknowledgements (`tcp.ack_us`, which communicators set) they are held
// for longer, and being late costs nothing: whoever shares its core is late every few hundred
// messages, and would soon send each acknowledgement by itself.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "transport/clock.h"

namespace baton::tcp {

class AckHold {
 public:
  static constexpr uint64_t kBytes = 4096;  // of a write that is small
  static constexpr uint32_t kRounds = 3;    // in which data may follow
  static constexpr uint32_t kManyRounds = 128;
  static constexpr Time kLongest = std::chrono::microseconds(50);
  static constexpr uint32_t kFewest = 8;  // that data followed, one after the other
  static constexpr uint32_t kMost = 512;

  // `longest`: more than kLongest says that no caller waits for acknowledgements.
  explicit AckHold(Time longest = kLongest) : longest_(longest) {}

  // An acknowledgement is to be sent.
  void queued(uint32_t round, Time now) {
    if (open_) return;
    open_ = true;
    held_ = false;
    round_ = round;
    since_ = now;
  }

  // Asked before sending, with nothing else than acknowledgements or with `data`. True: wait.
  bool wait(uint32_t round, Time now, bool data) {
    if (!open_) return false;
    const bool late =
        round - round_ > (unhurried() ? kManyRounds : kRounds) || now - since_ > longest_;
    if (data || late) {
      open_ = false;
      late ? missed() : followed();
      return false;
    }
    return held_ = followed_ >= needed_;
  }

  // When a held one leaves by itself, if a sleep may last until then.
  Time due() const { return open_ && held_ && unhurried() ? since_ + longest_ : kNever; }

 private:
  bool unhurried() const { return longest_ > kLongest; }
  void followed() {
    if (++followed_ % kMost == 0) needed_ = std::max(needed_ / 2, kFewest);
  }
  void missed() {
    if (held_ && !unhurried()) needed_ = std::min(needed_ * 2, kMost);
    followed_ = 0;
  }

  Time longest_;
  bool open_ = false;  // the last one, until it is known whether data follows
  bool held_ = false;
  uint32_t round_ = 0;
  Time since_{};
  uint32_t followed_ = 0;
  uint32_t needed_ = kFewest;
};

}  // namespace baton::tcp
