// The figures of moving device memory, on this machine's GPU.
#include <gtest/gtest.h>

#include <cstdio>
#include <memory>

#include "tests/gpudirect/machine/transfer_rig.h"

namespace baton::gpudirect {
namespace {

class FiguresOnThisMachine : public testing::Test {
 protected:
  void SetUp() override {
    const absl::StatusOr<const Driver*> driver = machine_driver();
    if (!driver.ok()) GTEST_SKIP() << driver.status().message();
    if (kernels::image().empty()) GTEST_SKIP() << "this build has no kernels: nvcc was not found";
    auto device = Device::open(**driver, 0);
    ASSERT_TRUE(device.ok()) << device.status();
    device_ = *std::move(device);
    auto launcher = Launcher::load(*device_);
    ASSERT_TRUE(launcher.ok()) << launcher.status();
    launcher_ = *std::move(launcher);
  }
  // A goal that is missed is a figure, not a failure of what is tested.
  template <typename Take>
  void print(const Take& take) {
    const auto figures = take(*device_, *launcher_, TransferSizes{});
    ASSERT_TRUE(figures.ok()) << figures.status();
    for (const Figure& figure : *figures) std::printf("row %s\n", json_of(figure).c_str());
  }
  std::unique_ptr<Device> device_;
  std::unique_ptr<Launcher> launcher_;
};

TEST_F(FiguresOnThisMachine, Transfers) { print(take_transfer_figures); }
TEST_F(FiguresOnThisMachine, Planner) { print(take_planner_figures); }
TEST_F(FiguresOnThisMachine, Triggers) { print(take_trigger_figures); }

}  // namespace
}  // namespace baton::gpudirect
