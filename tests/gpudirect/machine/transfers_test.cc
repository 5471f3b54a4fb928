// The figures of moving device memory, on this machine's GPU.
#include "tests/gpudirect/machine/transfer_rig.h"
#include "tests/gpudirect/machine/with_kernels.h"
#include "tests/test.h"

namespace baton::gpudirect {
namespace {

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
