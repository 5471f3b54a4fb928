// What takes the figures on a GPU, over the fake: its figures mean nothing, but they come, and the
// bytes are compared.
#include "tests/gpudirect/fake/installed_fake.h"
#include "tests/gpudirect/machine/transfer_rig.h"
#include "tests/must.h"
#include "tests/test.h"

namespace baton::gpudirect {
namespace {

using ::testing::ElementsAre;

std::vector<std::string> names_of(const std::vector<Figure>& figures) {
  std::vector<std::string> out;
  for (const Figure& figure : figures) out.push_back(figure.name);
  return out;
}

TEST(MachineRig, TakesEveryFigure) {
  CleanFake fake;
  const auto device = must(Device::open(FakeDriver::driver(), 0));
  const auto launcher = must(Launcher::load(*device, FakeDriver::image()));
  EXPECT_THAT(
      names_of(take_transfer_figures(*device, *launcher, kFewTransfers)),
      ElementsAre("device, shm, device: staged", "device, shm, device: staged, an eighth at a time",
                  "urgent, p50", "urgent, p99", "device to device by a mapping",
                  "bytes arrive while a kernel holds the device"));
  EXPECT_THAT(names_of(take_planner_figures(*device, *launcher, kFewTransfers)),
              ElementsAre("planner within 1.10 of the best fixed way",
                          "planner within 1.10 of the best fixed way, uneven lists",
                          "planner's measurement"));
}

TEST(MachineRig, AFigureSaysWhetherItsGoalIsMet) {
  const Figure slow{"a", "b", 0.5, "of it", 0.9};
  const Figure quick{"a", "b", 12, "us", 250, true};
  EXPECT_EQ(
      json_of(slow),
      R"({"name": "a", "shape": "b", "value": 0.5, "unit": "of it", "goal": ">= 0.9", "met": false})");
  EXPECT_EQ(
      json_of(quick),
      R"({"name": "a", "shape": "b", "value": 12, "unit": "us", "goal": "<= 250", "met": true})");
}

}  // namespace
}  // namespace baton::gpudirect
