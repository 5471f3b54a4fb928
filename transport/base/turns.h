// Turns between small and large work on one way: small work passes large work, but not for ever.
#pragma once

#include <cstddef>

namespace baton::base {

class Turns {
 public:
  // So much small work passes large work that waits; then the large work has a turn.
  static constexpr size_t kPassing = 1 << 20;
  // What a message costs whoever waits, beside its bytes: counted in bytes, too.
  static constexpr size_t kMessage = 4 << 10;

  bool large_is_due() const { return passed_ >= kPassing; }
  void small_went(size_t bytes, bool large_waits) {
    passed_ = large_waits ? passed_ + bytes + kMessage : 0;
  }
  void large_went() { passed_ = 0; }

 private:
  size_t passed_ = 0;
};

}  // namespace baton::base
