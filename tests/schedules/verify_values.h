// Symbolic values for the verifier: which contributions a place holds. Internal to verify*.cc.
#pragma once

#include <cstdint>
#include <vector>

#include "collectives/schedules/schedule.h"

namespace baton::collectives::proof::symbolic {

// The content of one place.
struct Value {
  static constexpr uint32_t kNothing = UINT32_MAX;          // never written
  static constexpr uint32_t kNotFollowed = UINT32_MAX - 1;  // a part outside the sample

  // Up to 64 ranks: the set of contributors. Above: the sum of their fingerprints.
  uint64_t low = 0, high = 0;
  uint32_t tag = kNothing;  // the part whose contributions these are
  uint32_t step = 0;        // that wrote it
  bool final = false;       // a final step lies on its way

  bool written() const { return tag != kNothing; }
  bool followed() const { return tag < kNotFollowed; }
  bool same_contributions(const Value& other) const {
    return low == other.low && high == other.high && tag == other.tag;
  }
};

// The contributions of all ranks.
class Contributions {
 public:
  Contributions(const schedules::ScheduleSpec& spec, uint32_t sampled_parts);

  bool exact() const { return exact_; }
  // The contribution of one rank to one part.
  Value of(uint32_t rank, uint32_t part) const;
  // The contributions of all ranks.
  Value all(uint32_t part) const;
  // a (+) b. False if they are of different parts, or (exactly known) share a contributor.
  static bool combine(const Value& a, const Value& b, bool exact, Value& sum);

 private:
  bool followed(uint32_t part) const;
  uint32_t ranks_;
  bool exact_;
  std::vector<uint32_t> sample_;  // sorted
};

// Numbered places of one rank. With a sample most values are alike, and kept as a byte.
class Memory {
 public:
  Memory() = default;
  Memory(uint32_t places, bool exact);
  Value read(uint32_t place) const;
  void write(uint32_t place, const Value& value);

 private:
  bool exact_ = true;
  std::vector<Value> values_;    // exact: by place; else only those followed
  std::vector<uint8_t> state_;   // not exact: nothing, not followed, followed
  std::vector<uint32_t> where_;  // the places of values_
};

}  // namespace baton::collectives::proof::symbolic
