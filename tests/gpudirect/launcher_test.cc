// Kernels over the fake driver: late, in the order of their stream, on memory that is there.
#include "gpudirect/launcher.h"

#include "absl/strings/match.h"
#include "gpudirect/device_memory.h"
#include "tests/gpudirect/fake/with_device.h"
#include "tests/test.h"

namespace baton::gpudirect {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class LauncherTest : public testing::Test {
 protected:
  // sum = values + values, on the device's stream to the host.
  absl::Status add_twice(DevicePointer sum, DevicePointer values, uint64_t count) {
    const Device::Current current(*device_);
    kernels::ReduceSum arguments{
        .target = reinterpret_cast<void*>(sum), .count = count, .source_count = 2};
    arguments.sources[0] = arguments.sources[1] = reinterpret_cast<const void*>(values);
    return launcher_->reduce_sum(arguments, 4, device_->stream(Direction::kToHost));
  }
  std::vector<float> read(DevicePointer at) { return read_floats(fake_, at, 3); }

  FakeDriver fake_;
  std::unique_ptr<Device> device_ = *Device::open(FakeDriver::driver(), 0);
  std::unique_ptr<Launcher> launcher_ = *Launcher::load(*device_, FakeDriver::image());
};

TEST_F(LauncherTest, AKernelRunsWhenItsStreamComesToIt) {
  const DevicePointer memory = fake_.allocate(2 << 20);
  write_floats(fake_, memory, {1, 2, 3});
  ASSERT_TRUE(add_twice(memory + 4096, memory, 3).ok());
  ASSERT_TRUE(add_twice(memory + 8192, memory + 4096, 3).ok());
  EXPECT_NE(read(memory + 4096), (std::vector<float>{2, 4, 6}));
  fake_.run(1);
  EXPECT_EQ(read(memory + 4096), (std::vector<float>{2, 4, 6}));
  EXPECT_NE(read(memory + 8192), (std::vector<float>{4, 8, 12}));
  fake_.run_all();
  EXPECT_EQ(read(memory + 8192), (std::vector<float>{4, 8, 12}));
  fake_.free(memory);
  launcher_.reset();
  device_.reset();
  EXPECT_THAT(fake_.finish(), IsEmpty());
}

TEST_F(LauncherTest, AnIllegalAddressLosesTheDevice) {
  const DevicePointer memory = fake_.allocate(2 << 20);
  ASSERT_TRUE(add_twice(memory + (2 << 20) - 16, memory, 8).ok());
  fake_.run_all();
  EXPECT_THAT(fake_.violations(),
              Contains(AllOf(HasSubstr("cuLaunchKernel: baton_reduce_sum"), HasSubstr("a store"))));
  EXPECT_EQ(add_twice(memory, memory, 8).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(device_->alive().code(), absl::StatusCode::kAborted);
}

TEST_F(LauncherTest, LoadingWhileAKernelRunsIsAViolation) {
  const DevicePointer memory = fake_.allocate(2 << 20);
  ASSERT_TRUE(add_twice(memory, memory, 8).ok());
  { ASSERT_TRUE(Launcher::load(*device_, FakeDriver::image()).ok()); }
  EXPECT_THAT(fake_.violations(),
              Contains(HasSubstr("cuModuleLoadData: it waits for the kernels")));
  fake_.run_all();
}

TEST_F(LauncherTest, WithoutAnImageItSaysWhatToDo) {
  const absl::Status status = Launcher::load(*device_, {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(status.message()), HasSubstr("install CUDA's toolkit and build again"));
}

TEST(Launcher, WithoutRoomItDoesNotSayThatTheDeviceIsTooOld) {
  CleanDriver fake;
  const auto device = Device::open(FakeDriver::driver(), 0);
  for (const Result result : {kNotSupported, kOutOfMemory, kLaunchFailed}) {
    fake.fail_next("cuModuleLoadData", result);
    const absl::Status status = Launcher::load(**device, FakeDriver::image()).status();
    EXPECT_EQ(absl::IsUnimplemented(status), result == kNotSupported) << status;
    EXPECT_EQ(absl::StrContains(status.message(), "compute capability"), result == kNotSupported)
        << status;
  }
}

TEST(Launcher, ADriverOlderThanCuFuncLoadWillDo) {
  CleanDriver fake({.version = 12020});
  const auto device = Device::open(FakeDriver::driver(), 0);
  EXPECT_TRUE(Launcher::load(**device, FakeDriver::image()).ok());
  EXPECT_EQ(fake.calls_of("cuFuncLoad"), 0u);
}

}  // namespace
}  // namespace baton::gpudirect
