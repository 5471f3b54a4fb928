// The names of an enum's values in a table, by their numbers.
#pragma once

#include <cstddef>

namespace baton::base {

// `otherwise`: for a number behind the last one.
template <typename Enum, size_t kCount>
const char* name_at(const char* const (&names)[kCount], Enum value, const char* otherwise) {
  const auto at = static_cast<size_t>(value);
  return at < kCount ? names[at] : otherwise;
}

}  // namespace baton::base
