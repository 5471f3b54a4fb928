// Symbolic values: sets of contributors, or fingerprints of them.
#include "tests/schedules/verify_values.h"

#include <algorithm>

#include "transport/base/splitmix.h"

namespace baton::collectives::proof::symbolic {
namespace {

enum : uint8_t { kUnwritten, kAlike, kKept };
constexpr uint64_t kSeed = 1;

}  // namespace

Contributions::Contributions(const schedules::ScheduleSpec& spec, uint32_t sampled_parts)
    : ranks_(spec.ranks), exact_(spec.ranks <= 64) {
  if (exact_) return;
  const uint32_t parts = schedules::parts_of(spec);
  for (uint32_t i = 0; i < sampled_parts; ++i) {
    sample_.push_back(static_cast<uint32_t>(base::splitmix(base::splitmix(kSeed) + i) % parts));
  }
  std::sort(sample_.begin(), sample_.end());
}

bool Contributions::followed(uint32_t part) const {
  return exact_ || std::binary_search(sample_.begin(), sample_.end(), part);
}

Value Contributions::of(uint32_t rank, uint32_t part) const {
  if (exact_) return {.low = uint64_t{1} << rank, .tag = part};
  if (!followed(part)) return {.tag = Value::kNotFollowed};
  const uint64_t base = base::splitmix(kSeed ^ base::splitmix((uint64_t{rank} << 32) | part));
  return {.low = base::splitmix(base), .high = base::splitmix(base + 1), .tag = part};
}

Value Contributions::all(uint32_t part) const {
  Value sum = of(0, part);
  if (!sum.followed()) return sum;
  for (uint32_t rank = 1; rank < ranks_; ++rank) combine(sum, of(rank, part), exact_, sum);
  return sum;
}

bool Contributions::combine(const Value& a, const Value& b, bool exact, Value& sum) {
  if (a.tag != b.tag || (exact && (a.low & b.low) != 0)) return false;
  const Value left = a;
  sum.tag = left.tag;
  sum.low = left.low + b.low;
  sum.high = left.high + b.high + (sum.low < b.low ? 1 : 0);
  return true;
}

Memory::Memory(uint32_t places, bool exact) : exact_(exact) {
  if (exact) {
    values_.resize(places);
  } else {
    state_.resize(places, kUnwritten);
  }
}

Value Memory::read(uint32_t place) const {
  if (exact_) return values_[place];
  if (state_[place] == kUnwritten) return {};
  if (state_[place] == kAlike) return {.tag = Value::kNotFollowed};
  return values_[std::find(where_.begin(), where_.end(), place) - where_.begin()];
}

void Memory::write(uint32_t place, const Value& value) {
  if (exact_) {
    values_[place] = value;
    return;
  }
  if (state_[place] == kKept) {
    const auto at = std::find(where_.begin(), where_.end(), place) - where_.begin();
    if (value.followed()) {
      values_[at] = value;
      return;
    }
    where_[at] = where_.back();
    values_[at] = values_.back();
    where_.pop_back();
    values_.pop_back();
  } else if (value.followed()) {
    where_.push_back(place);
    values_.push_back(value);
  }
  state_[place] = !value.written() ? kUnwritten : value.followed() ? kKept : kAlike;
}

}  // namespace baton::collectives::proof::symbolic
