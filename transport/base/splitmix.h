// splitmix64 (Steele, Lea and Flood, 2014): a small generator, and the hash that it is made of.
#pragma once

#include <cstdint>

namespace baton::base {

inline constexpr uint64_t kSplitmixStep = 0x9e3779b97f4a7c15;

// Every bit of `z` changes half the bits of the result. 0 stays 0.
constexpr uint64_t splitmix_hash(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

// The next number of the generator whose state is `state`; any first state will do.
constexpr uint64_t splitmix_next(uint64_t& state) { return splitmix_hash(state += kSplitmixStep); }

// The first number of the generator that starts with `seed`.
constexpr uint64_t splitmix(uint64_t seed) { return splitmix_hash(seed + kSplitmixStep); }

}  // namespace baton::base
