// Which seeds a test with random faults runs, and numbers of the environment.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace baton {

inline uint64_t number_of(const char* variable, uint64_t otherwise) {
  const char* given = std::getenv(variable);
  return given == nullptr ? otherwise : std::strtoull(given, nullptr, 10);
}

// From `begin` up to, and without, `end`. BATON_SEED=n: n alone. Otherwise BATON_SEEDS of them, or
// as many as the test takes usually, from BATON_FIRST_SEED (0) on: continuous integration begins
// each run where the last one ended.
struct Seeds {
  explicit Seeds(uint64_t usually) {
    const uint64_t only = number_of("BATON_SEED", UINT64_MAX);
    one = only != UINT64_MAX;
    begin = one ? only : number_of("BATON_FIRST_SEED", 0);
    end = begin + (one ? 1 : number_of("BATON_SEEDS", usually));
  }
  uint64_t count() const { return end - begin; }

  uint64_t begin = 0, end = 0;
  bool one = false;  // what only many schedules reach together is not expected of one
};

}  // namespace baton
