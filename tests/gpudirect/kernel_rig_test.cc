// What is run on a GPU, over the fake: so that one run there shows the GPU and not its test.
#include "tests/gpudirect/kernel_rig.h"

#include "tests/gpudirect/fake/clean_driver.h"
#include "tests/test.h"

namespace baton::gpudirect {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

TEST(KernelRig, ComparesAndTimesEveryKernel) {
  CleanDriver fake;
  const auto device = must(Device::open(FakeDriver::driver(), 0));
  const auto launcher = must(Launcher::load(*device, FakeDriver::image()));
  KernelRig rig(*device, 32 << 20);
  EXPECT_THAT(compare_kernels(rig, *launcher), IsEmpty());
  const std::vector<KernelRow> rows = time_kernels(rig, *launcher, 256 << 10, 1);
  std::set<std::string> names;
  for (const KernelRow& row : rows) names.insert(row.name);
  EXPECT_EQ(names, (std::set<std::string>{"adamw", "classifier", "copy", "gather", "gemm",
                                          "gemm bf16", "gemm f32", "paged decode", "paged prefill",
                                          "reduce bf16", "rms_norm", "rope and store", "sample"}));
  EXPECT_THAT(json_of(rows[0]), HasSubstr(R"("name": "copy", "shape": "262144 bytes")"));
}

TEST(KernelRig, SaysWhichGoalIsMissed) {
  KernelRow row{.name = "gather", .shape = "8 pages", .of_copy = 0.89, .goal = 0.90};
  EXPECT_THAT(json_of(row), HasSubstr(R"("goal": "of_copy >= 0.90", "met": false)"));
  row.of_floor = 0.91;
  EXPECT_THAT(json_of(row),
              HasSubstr(R"("of_floor": 0.910, "goal": "of_floor >= 0.90", "met": true)"));
  row.goal = 0;
  EXPECT_THAT(json_of(row), Not(HasSubstr("goal")));
}

}  // namespace
}  // namespace baton::gpudirect
