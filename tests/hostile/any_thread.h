// Random numbers and a shared pile of ids, for threads that do what they like with one object.
#pragma once

#include "tests/std.h"
#include "transport/base/splitmix.h"

namespace baton::hostile {

class Dice {
 public:
  explicit Dice(uint64_t seed) : state_(base::splitmix(seed)) {}
  uint64_t below(uint64_t end) { return base::splitmix_next(state_) % end; }
  bool one_in(uint64_t n) { return below(n) == 0; }

 private:
  uint64_t state_;
};

// Ids that every thread may use, and end, at any moment.
template <typename Id>
class Pile {
 public:
  void add(Id id) {
    const std::lock_guard lock(mutex_);
    ids_.push_back(id);
  }
  std::optional<Id> look(Dice& dice) {
    const std::lock_guard lock(mutex_);
    if (ids_.empty()) return std::nullopt;
    return ids_[dice.below(ids_.size())];
  }
  std::optional<Id> take(Dice& dice) {
    const std::lock_guard lock(mutex_);
    if (ids_.empty()) return std::nullopt;
    std::swap(ids_[dice.below(ids_.size())], ids_.back());
    const Id id = ids_.back();
    ids_.pop_back();
    return id;
  }

 private:
  std::mutex mutex_;
  std::vector<Id> ids_;
};

}  // namespace baton::hostile
