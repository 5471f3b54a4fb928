// A fuzz harness that is replayed: see cmake/BatonFuzz.cmake, which declares one for each.
#pragma once

#include <cstddef>
#include <cstdint>

namespace baton {

using FuzzHarness = int (*)(const uint8_t* data, size_t size);

// Lives as long as the program, and says before main() that there is a harness of this name.
struct FuzzReplay {
  FuzzReplay(const char* name, FuzzHarness harness);
};

}  // namespace baton
