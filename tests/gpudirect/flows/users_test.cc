// All of gpudirect beside an application that uses CUDA too: what it records, and the contexts of
// its own, are as if nobody else were there.
#include "tests/gpudirect/fake/clean_driver.h"
#include "tests/gpudirect/flows/flows.h"
#include "tests/test.h"

namespace baton::gpudirect {
namespace {

// Promise(devices): Recording a CUDA graph in the application is not disturbed by transfers | calls
//   use the device's context and relaxed mode, then restore both
TEST(Applications, RecordGraphsMeanwhileOnWhicheverThread) {
  for (const bool on_this_thread : {false, true}) {
    for (const Flow& flow : flows()) {
      SCOPED_TRACE(flow.name);
      CleanDriver fake({.attributes = flow.attributes()});
      const FakeDriver::UsersRecording recording(fake, on_this_thread);
      const absl::Status status = flow.run(fake, FakeDriver::driver());
      EXPECT_TRUE(status.ok()) << status;
      EXPECT_TRUE(recording.intact());
    }
  }
}

TEST(Applications, HaveTheContextCurrentThatTheyHadBefore) {
  for (const Flow& flow : flows()) {
    SCOPED_TRACE(flow.name);
    CleanDriver fake({.devices = 2, .attributes = flow.attributes()});
    const Driver driver = FakeDriver::driver();
    for (const int device : {0, 1}) {
      const Context users = fake.make_context(device);
      ASSERT_EQ(driver.cuCtxPushCurrent(users), kSuccess);
      const absl::Status status = flow.run(fake, driver);
      EXPECT_TRUE(status.ok()) << status;
      Context popped = nullptr;
      ASSERT_EQ(driver.cuCtxPopCurrent(&popped), kSuccess);
      EXPECT_EQ(popped, users);
      EXPECT_FALSE(FakeDriver::has_current());
    }
  }
}

// An old driver has no mode of threads, and does what it did.
TEST(Applications, AreNotAskedWhereTheDriverHasNoWordForIt) {
  CleanDriver fake({.missing = {"cuThreadExchangeStreamCaptureMode", "cuStreamIsCapturing"}});
  for (const Flow& flow : flows()) {
    const absl::Status status = flow.run(fake, FakeDriver::driver());
    EXPECT_TRUE(status.ok() || flow.attributes != h100) << flow.name << ": " << status;
  }
}

}  // namespace
}  // namespace baton::gpudirect
