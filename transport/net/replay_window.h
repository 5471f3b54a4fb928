// Tracks which frame numbers have been seen, for frames that arrive in any order.
#pragma once

#include <algorithm>
#include <bitset>
#include <cstddef>
#include <cstdint>

namespace baton::net {

// As in RFC 4303, section 3.4.3: the numbers seen last, as bits. One that is older than all of them
// is taken for seen.
class ReplayWindow {
 public:
  static constexpr uint64_t kNumbers = 4096;

  bool seen(uint64_t number) const {
    if (number >= next_) return false;
    return next_ - number > kNumbers || seen_[number % kNumbers];
  }
  // To be called once the frame is known to be the peer's.
  void add(uint64_t number) {
    if (number >= next_ && number - next_ >= kNumbers) seen_.reset();
    for (uint64_t each = next_; each < number && number - next_ < kNumbers; ++each) {
      seen_[each % kNumbers] = false;
    }
    next_ = std::max(next_, number + 1);
    seen_[number % kNumbers] = true;
  }

 private:
  uint64_t next_ = 0;
  std::bitset<kNumbers> seen_;
};

}  // namespace baton::net
