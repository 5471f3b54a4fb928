// The fake is strict: what a real driver would punish, it sees.
#include "tests/gpudirect/fake/fake_driver.h"

#include "gpudirect/device.h"
#include "gpudirect/device_memory.h"
#include "tests/test.h"

namespace baton::gpudirect {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class FakeTest : public testing::Test {
 protected:
  void open(FakeOptions options = {}) {
    fake_.reset();
    fake_ = std::make_unique<FakeDriver>(std::move(options));
    driver_ = FakeDriver::driver();
    device_ = *Device::open(driver_, 0);
    slab_ = *DeviceSlab::create(*device_, 2 * kMiB);
    device_memory_ = slab_->span().data;
    Device::Current current(*device_);
    ASSERT_EQ(driver_.cuMemHostRegister(host_.data(), host_.size(), kHostPortable), kSuccess);
  }
  void close() {
    if (device_ == nullptr) return;
    {
      Device::Current current(*device_);
      driver_.cuMemHostUnregister(host_.data());
    }
    slab_.reset();
    device_.reset();
  }
  void TearDown() override { close(); }
  DevicePointer host(size_t at = 0) const { return reinterpret_cast<uintptr_t>(host_.data() + at); }
  Result copy(DevicePointer to, DevicePointer from, size_t bytes,
              Direction direction = Direction::kToDevice) {
    Device::Current current(*device_);
    return driver_.cuMemcpyAsync(to, from, bytes, device_->stream(direction));
  }
  void expect_violation(const std::string& call, const std::string& what) {
    EXPECT_THAT(fake_->violations(), Contains(testing::AllOf(HasSubstr(call), HasSubstr(what))));
  }

  std::vector<char> host_ = std::vector<char>(4 * kMiB, 'h');
  std::unique_ptr<FakeDriver> fake_;
  Driver driver_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<DeviceSlab> slab_;
  DevicePointer device_memory_ = 0;
};
using FakeDeathTest = FakeTest;

TEST_F(FakeDeathTest, TheHostCannotTouchDeviceMemory) {
  open();
  const auto* byte = reinterpret_cast<const volatile char*>(uintptr_t{device_memory_});
  EXPECT_DEATH([[maybe_unused]] const char read = *byte, "");
}

TEST_F(FakeTest, BytesMoveWhenTheStreamRunsAndNotAtTheCall) {
  open();
  EXPECT_EQ(copy(device_memory_, host(), 3), kSuccess);
  EXPECT_NE(fake_->read(device_memory_, 3), "hhh");
  host_[1] = 'x';  // too early, as the reader will see
  fake_->run_all();
  EXPECT_EQ(fake_->read(device_memory_, 3), "hxh");
  close();
  EXPECT_THAT(fake_->finish(), IsEmpty());
}

TEST_F(FakeTest, StreamsRunInTheOrderOfTheSeed) {
  const auto first_done = [&](uint64_t seed, Attributes attributes) {
    open({.seed = seed, .attributes = std::move(attributes)});
    fake_->write(device_memory_ + kMiB, "d");
    copy(device_memory_, host(), 1);
    copy(host(8), device_memory_ + kMiB, 1, Direction::kToHost);
    fake_->run(1);
    const bool to_host = host_[8] == 'd';
    host_[8] = 'h';
    fake_->run_all();
    host_[8] = 'h';
    close();
    return to_host;
  };
  int reordered = 0;
  for (uint64_t seed = 1; seed <= 32; ++seed) reordered += first_done(seed, h100());
  EXPECT_GT(reordered, 0);
  EXPECT_LT(reordered, 32);
  for (uint64_t seed = 1; seed <= 32; ++seed) EXPECT_FALSE(first_done(seed, one_copy_engine()));
}

TEST_F(FakeTest, CallsWithoutAContext) {
  open();
  EXPECT_EQ(driver_.cuMemcpyAsync(device_memory_, host(), 1, device_->stream(Direction::kToDevice)),
            kInvalidContext);
  expect_violation("cuMemcpyAsync", "no context is current");
}

TEST_F(FakeTest, CopiesOfWhatIsNeitherPinnedNorTheDevices) {
  open();
  char pageable = 0;
  EXPECT_EQ(copy(device_memory_, reinterpret_cast<uintptr_t>(&pageable), 1), kInvalidValue);
  EXPECT_EQ(copy(device_memory_, host(), 3 * kMiB), kInvalidValue);
  EXPECT_EQ(fake_->violations().size(), 2u);
  expect_violation("cuMemcpyAsync", "neither");
}

TEST_F(FakeTest, CopiesOnTheLegacyStream) {
  open();
  Device::Current current(*device_);
  driver_.cuMemcpyAsync(device_memory_, host(), 1, nullptr);
  expect_violation("cuMemcpyAsync", "legacy stream");
}

TEST_F(FakeTest, WhatIsGivenBackWhileACopyUsesIt) {
  open();
  copy(device_memory_, host(), 1);
  close();
  expect_violation("cuMemHostUnregister", "still in use");
  expect_violation("cuMemUnmap", "still in use");
  expect_violation("cuStreamDestroy", "still queued");
}

TEST_F(FakeTest, WhatIsLeftBehind) {
  open();
  Event event = nullptr;
  {
    Device::Current current(*device_);
    driver_.cuEventCreate(&event, kEventDisableTiming);
  }
  const std::vector<std::string> left = fake_->finish();
  for (const char* what : {"allocation", "reserved", "registered", "stream", "event", "retained"}) {
    EXPECT_THAT(left, Contains(HasSubstr(what)));
  }
  Device::Current current(*device_);
  driver_.cuEventDestroy(event);
  EXPECT_EQ(driver_.cuEventDestroy(event), kInvalidHandle);
  expect_violation("cuEventDestroy", "no such event");
  EXPECT_THAT(fake_->finish(), Contains(HasSubstr("left current")));
}

// Promise(devices): Mistakes in how the driver is called are noticed without a GPU | the fake
//   driver's rules, each of which tests break on purpose
TEST_F(FakeTest, MemoryCallsInTheWrongOrderOrSize) {
  open();
  AllocationProperties properties;
  AllocationHandle handle = 0;
  EXPECT_EQ(driver_.cuMemCreate(&handle, 4096, &properties, 0), kInvalidValue);
  expect_violation("cuMemCreate", "granularity");
  EXPECT_EQ(driver_.cuMemMap(device_memory_, 2 * kMiB, 0, 77, 0), kInvalidValue);
  expect_violation("cuMemMap", "no such handle");
  EXPECT_EQ(driver_.cuMemRelease(77), kInvalidValue);
  expect_violation("cuMemRelease", "released before");
  EXPECT_EQ(driver_.cuMemAddressFree(device_memory_, 2 * kMiB), kInvalidValue);
  expect_violation("cuMemAddressFree", "still mapped");
  ASSERT_EQ(driver_.cuMemCreate(&handle, 2 * kMiB, &properties, 0), kSuccess);
  EXPECT_EQ(driver_.cuMemMap(device_memory_, 2 * kMiB, 0, handle, 0), kInvalidValue);
  expect_violation("cuMemMap", "something is mapped there");
  DevicePointer at = 0;
  ASSERT_EQ(driver_.cuMemAddressReserve(&at, 2 * kMiB, 0, 0, 0), kSuccess);
  EXPECT_EQ(driver_.cuMemMap(at, 2 * kMiB, 4096, handle, 0), kInvalidValue);
  expect_violation("cuMemMap", "offset must be 0");
  ASSERT_EQ(driver_.cuMemMap(at, 2 * kMiB, 0, handle, 0), kSuccess);
  EXPECT_EQ(copy(at, host(), 1), kInvalidValue);  // access was not set
  driver_.cuMemUnmap(at, 2 * kMiB);
  driver_.cuMemAddressFree(at, 2 * kMiB);
  driver_.cuMemRelease(handle);
}

TEST_F(FakeTest, RangesThatCannotBeExported) {
  open();
  int fd = -1;
  Device::Current current(*device_);
  EXPECT_EQ(driver_.cuMemGetHandleForAddressRange(&fd, device_memory_ + 1, 4096, kDmaBufFd, 0),
            kInvalidValue);
  expect_violation("cuMemGetHandleForAddressRange", "whole pages");
  EXPECT_EQ(driver_.cuMemGetHandleForAddressRange(&fd, device_memory_, 4 * kMiB, kDmaBufFd, 0),
            kInvalidValue);
  expect_violation("cuMemGetHandleForAddressRange", "not in one allocation");
}

TEST_F(FakeTest, CallsThatBlockOnAProgressThread) {
  open();
  const FakeDriver::ProgressThread here;
  Device::Current current(*device_);
  driver_.cuMemHostUnregister(host_.data());
  expect_violation("cuMemHostUnregister", "progress thread");
  driver_.cuMemHostRegister(host_.data(), host_.size(), 0);
}

TEST_F(FakeTest, EntriesAskedForAsOfAnotherVersion) {
  open();
  void* entry = nullptr;
  int found = 0;
  FakeDriver::get_proc_address()("cuMemcpyAsync", &entry, 5000, 0, &found);
  EXPECT_THAT(fake_->violations(),
              ElementsAre("cuMemcpyAsync: asked for as of 5000, and is as of 4000 [entry]"));
}

}  // namespace
}  // namespace baton::gpudirect
