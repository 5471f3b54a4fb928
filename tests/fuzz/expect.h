// What a harness says of what must be so.
#pragma once

#include <cstdlib>

inline void expect(bool good) {
  if (!good) std::abort();
}
