// What a harness says of what must be so.
#pragma once

#include "tests/std.h"

inline void expect(bool good) {
  if (!good) std::abort();
}

// What is accepted encodes to something that says the same; a refusal says why.
template <typename T>
auto round_trip(std::string_view bytes) {
  const auto first = T::decode(bytes);
  expect(first.ok() || !first.status().message().empty());
  if (!first.ok()) return first;
  const std::string encoded = first->encode();
  const auto again = T::decode(encoded);
  expect(again.ok() && again->encode() == encoded);
  return first;
}
