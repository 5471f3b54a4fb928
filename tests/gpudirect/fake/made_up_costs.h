// Costs of copies that no device has: so that tests copy by all the ways there are.
#pragma once

#include "gpudirect/contract/memory_place.h"
#include "tests/gpudirect/fake/fake_driver.h"
#include "tests/test.h"

namespace baton::gpudirect {

inline CopyTable made_up_costs(uint64_t seed) {
  std::mt19937_64 random(seed);
  CopyTable table;
  for (size_t route = 0; route < kCopyRoutes; ++route) {
    for (size_t way = 0; way < kCopyWays; ++way) {
      table.fill(static_cast<CopyRoute>(route), static_cast<CopyWay>(way),
                 [&](size_t, size_t) { return static_cast<double>(random() % 1000); });
    }
  }
  return table;
}

// A nanosecond for one way, and a millisecond for every other.
inline CopyTable costs_that_favour(CopyWay cheap) {
  CopyTable table;
  for (size_t route = 0; route < kCopyRoutes; ++route) {
    for (size_t i = 0; i < kCopyWays; ++i) {
      const auto way = static_cast<CopyWay>(i);
      table.fill(static_cast<CopyRoute>(route), way,
                 [&](size_t, size_t) { return way == cheap ? 1.0 : 1e6; });
    }
  }
  return table;
}

inline SumCosts made_up_sums(uint64_t seed) {
  std::mt19937_64 random(seed);
  SumCosts costs;
  for (double& start : costs.start) start = static_cast<double>(random() % 10'000);
  for (double& byte : costs.byte) byte = static_cast<double>(random() % 100) * 1e-3;
  costs.host_copy = static_cast<double>(random() % 100) * 1e-3;
  return costs;
}

// Others in each test, the same ones in each run of it. One test in four has the kernels that the
// fake emulates, which takes time.
inline CudaMemory::Options options_of_this_test() {
  const testing::TestInfo* const test = testing::UnitTest::GetInstance()->current_test_info();
  const std::string name = test == nullptr ? "" : test->name();
  uint64_t seed = 14695981039346656037u;
  for (const char letter : name) seed = (seed ^ static_cast<uint8_t>(letter)) * 1099511628211u;
  CudaMemory::Options options{
      .kernels = {}, .table = made_up_costs(seed), .sums = made_up_sums(seed), .root = "/nowhere"};
  if ((seed >> 32) % 4 == 0) options.kernels = FakeDriver::image();
  return options;
}

}  // namespace baton::gpudirect
