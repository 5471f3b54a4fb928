// What takes the figures on a GPU, over the fake: its figures mean nothing, but they come, and the
// bytes are compared.
#include "tests/gpudirect/fake/installed_fake.h"
#include "tests/gpudirect/machine/transfer_rig.h"
#include "tests/test.h"

namespace baton::gpudirect {
namespace {

using ::testing::ElementsAre;

std::vector<std::string> names_of(const absl::StatusOr<std::vector<Figure>>& figures) {
  EXPECT_TRUE(figures.ok()) << figures.status();
  std::vector<std::string> out;
  for (const Figure& figure : figures.value_or(std::vector<Figure>{})) {
    out.push_back(figure.name);
  }
  return out;
}

// Stands for cuBLASLt: every call works, and nothing is multiplied.
CublasLt nothing_multiplied() {
  CublasLt blas;
  blas.cublasLtCreate = [](BlasHandle*) { return 0; };
  blas.cublasLtDestroy = [](BlasHandle) { return 0; };
  blas.cublasLtMatmulDescCreate = [](BlasDescription*, int, int) { return 0; };
  blas.cublasLtMatmulDescDestroy = [](BlasDescription) { return 0; };
  blas.cublasLtMatmulDescSetAttribute = [](BlasDescription, int, const void*, size_t) { return 0; };
  blas.cublasLtMatrixLayoutCreate = [](BlasLayout*, int, uint64_t, uint64_t, int64_t) { return 0; };
  blas.cublasLtMatrixLayoutDestroy = [](BlasLayout) { return 0; };
  blas.cublasLtMatmulPreferenceCreate = [](BlasPreference*) { return 0; };
  blas.cublasLtMatmulPreferenceDestroy = [](BlasPreference) { return 0; };
  blas.cublasLtMatmulPreferenceSetAttribute = [](BlasPreference, int, const void*, size_t) {
    return 0;
  };
  blas.cublasLtMatmulAlgoGetHeuristic = [](BlasHandle, BlasDescription, BlasLayout, BlasLayout,
                                           BlasLayout, BlasLayout, BlasPreference, int, BlasChoice*,
                                           int* found) {
    *found = 1;
    return 0;
  };
  blas.cublasLtMatmul = [](BlasHandle, BlasDescription, const void*, const void*, BlasLayout,
                           const void*, BlasLayout, const void*, const void*, BlasLayout, void*,
                           BlasLayout, const BlasAlgorithm*, void*, size_t, Stream) { return 0; };
  return blas;
}

TEST(MachineRig, TakesEveryFigure) {
  InstalledFake fake;
  {
    const auto device = Device::open(FakeDriver::driver(), 0);
    const auto launcher = Launcher::load(**device, FakeDriver::image());
    ASSERT_TRUE(launcher.ok()) << launcher.status();
    EXPECT_THAT(names_of(take_transfer_figures(**device, **launcher, kFewTransfers)),
                ElementsAre("device, shm, device: staged",
                            "device, shm, device: staged, an eighth at a time", "urgent, p50",
                            "urgent, p99", "device to device by a mapping",
                            "bytes arrive while a kernel holds the device"));
    const auto none =
        take_overlap_figures(**device, absl::UnavailableError("no cuBLASLt"), kFewTransfers);
    ASSERT_EQ(names_of(none),
              std::vector<std::string>{"a product's time under transfers both ways"});
    EXPECT_EQ(none->front().shape, "no cuBLASLt");
    EXPECT_TRUE(none->front().met());
    const CublasLt blas = nothing_multiplied();
    const auto overlap = take_overlap_figures(**device, &blas, kFewTransfers);
    ASSERT_TRUE(overlap.ok()) << overlap.status();
    EXPECT_GT(overlap->front().value, 0);
    EXPECT_TRUE(overlap->front().goal.has_value());
    EXPECT_THAT(names_of(take_planner_figures(**device, **launcher, kFewTransfers)),
                ElementsAre("planner within 1.10 of the best fixed way",
                            "planner within 1.10 of the best fixed way, uneven lists",
                            "planner's measurement"));
  }
  fake.expect_clean();
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
