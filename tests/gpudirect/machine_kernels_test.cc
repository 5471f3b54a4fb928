// The kernels on this machine's GPU: to the bit as their emulation, and their times.
#include "tests/gpudirect/kernel_rig.h"
#include "tests/gpudirect/machine/transfer_rig.h"
#include "tests/test.h"

namespace baton::gpudirect {
namespace {

using ::testing::IsEmpty;

using KernelsOnThisMachine = WithKernelsOfThisMachine;

// Promise(devices): Kernels compute the bits of the CPU's code | one source; multiply-adds are
//   fused only where written
TEST_F(KernelsOnThisMachine, WriteWhatTheirEmulationWrites) {
  KernelRig rig(*device_, 64 << 20);
  EXPECT_THAT(compare_kernels(rig, *launcher_), IsEmpty());
}

TEST_F(KernelsOnThisMachine, Times) {
  KernelRig rig(*device_, size_t{2} << 30);
  for (const KernelRow& row : time_kernels(rig, *launcher_, 512 << 20, 20)) {
    std::printf("row %s\n", json_of(row).c_str());
  }
}

class FiguresOnThisMachine : public WithKernelsOfThisMachine {
 protected:
  // A goal that is missed is a figure, not a failure of what is tested.
  template <typename Take>
  void print(const Take& take) {
    for (const Figure& figure : take(*device_, *launcher_, TransferSizes{})) {
      std::printf("row %s\n", json_of(figure).c_str());
    }
  }
};

TEST_F(FiguresOnThisMachine, Transfers) { print(take_transfer_figures); }
TEST_F(FiguresOnThisMachine, Planner) { print(take_planner_figures); }

}  // namespace

}  // namespace baton::gpudirect
