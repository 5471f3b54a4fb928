// Whether two results are one: to the bit, so that zeros differ by their sign and NaNs by their
// payload.
#pragma once

#include <cstring>
#include <span>

namespace baton::engine {

inline bool same_bits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

}  // namespace baton::engine
