// The order in which a queue of small and one of large slices share a rail: small ones go first,
// but after 1 MiB of them a large one that waits has its turn.
#pragma once

#include <cstddef>

namespace baton::base {

class SmallFirst {
 public:
  // So much small work passes large work that waits; then the large work has a turn.
  static constexpr size_t kPassing = 1 << 20;
  // The cost of a message besides its bytes, expressed in bytes.
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
