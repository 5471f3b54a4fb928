// Takes the figures of moving device memory, on whichever driver there is: rates of staged and of
// mapped transfers beside the links' own, what an urgent one waits, whether bytes arrive while a
// kernel has the whole device, and the planner's regret.
//
// Every transfer's bytes are compared. Two workers of this process stand for two.
#pragma once

#include "gpudirect/device.h"
#include "gpudirect/kernels/image.h"
#include "gpudirect/launcher.h"
#include "tests/must.h"
#include "tests/std.h"
#include "tests/test.h"

namespace baton::gpudirect {

struct Figure {
  std::string name;
  std::string shape;
  double value = 0;
  std::string unit;
  // What it is to be: at least, or with `at_most` at most; nothing: no goal.
  std::optional<double> goal;
  bool at_most = false;

  bool met() const { return !goal.has_value() || (at_most ? value <= *goal : value >= *goal); }
};
std::string json_of(const Figure& figure);

struct TransferSizes {
  size_t bulk = size_t{1} << 30;              // what an urgent transfer has to overtake
  size_t transfer = 64 << 20;                 // whose rate is taken
  int rounds = 20;                            // of a transfer, and copies beside it
  int urgent = 200;                           // urgent transfers
  size_t grid_bytes = 32 << 20;               // of a list of the planner's grid, at most
  uint64_t hold_nanoseconds = 5'000'000'000;  // for which a block has the device, at most
};
// Enough to make every call that the figures make; for figures it is too little.
inline constexpr TransferSizes kFewTransfers{.bulk = 8 << 20,
                                             .transfer = 1 << 20,
                                             .rounds = 2,
                                             .urgent = 5,
                                             .grid_bytes = 16 << 10,
                                             .hold_nanoseconds = 1'000};

// Blocks. Throws the driver's words where it fails, and DataLoss where bytes are wrong.
std::vector<Figure> take_transfer_figures(const Device& device, const Launcher& launcher,
                                          const TransferSizes& sizes);
std::vector<Figure> take_planner_figures(const Device& device, const Launcher& launcher,
                                         const TransferSizes& sizes);

// Tests of this machine's GPU and of the kernels on it; skipped where there is none of either.

class WithKernelsOfThisMachine : public testing::Test {
 protected:
  void SetUp() override {
    const absl::StatusOr<const Driver*> driver = machine_driver();
    if (!driver.ok()) GTEST_SKIP() << driver.status().message();
    if (kernels::image().empty()) GTEST_SKIP() << "this build has no kernels: nvcc was not found";
    device_ = must(Device::open(**driver, 0));
    launcher_ = must(Launcher::load(*device_));
  }
  std::unique_ptr<Device> device_;
  std::unique_ptr<Launcher> launcher_;
};

}  // namespace baton::gpudirect
