// Whatever call of the driver fails, wherever gpudirect is: an error is said or all is done, and
// nothing is left behind or breaks a rule.
#include "tests/gpudirect/flows/flows.h"
#include "tests/sanitized.h"
#include "tests/test.h"

namespace baton::gpudirect {
namespace {

// Promise(devices): Nothing of the driver's is leaked after any failing call | the fake driver
//   forgives no leak
TEST(EveryCall, ThatFailsIsSaidOrDoneAllTheSameAndLeavesNothingBehind) {
  const uint64_t every = kSanitized ? 3 : 1;
  for (const Flow& flow : flows()) {
    uint64_t calls = 0;
    size_t said = 0;
    for (uint64_t k = 0; k <= calls; ++k) {
      if (k == 1 || (k != 0 && k % every != 0)) continue;  // the first is cuInit
      SCOPED_TRACE(testing::Message() << flow.name << ", call " << k);
      FakeDriver fake({.attributes = flow.attributes(), .fail_call = k});
      const absl::Status status = flow.run(fake, FakeDriver::driver());
      EXPECT_FALSE(absl::IsDataLoss(status)) << status;
      EXPECT_FALSE(absl::IsDeadlineExceeded(status)) << status;
      EXPECT_THAT(fake.finish(), testing::IsEmpty()) << status;
      if (k == 0) {
        ASSERT_TRUE(status.ok()) << status;
        calls = fake.calls();
      }
      said += status.ok() ? 0 : 1;
    }
    EXPECT_GT(said, 30u / every) << flow.name;
  }
}

}  // namespace
}  // namespace baton::gpudirect
