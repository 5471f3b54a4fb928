// The driver is found, or one line says why not.
#include "tests/gpudirect/fake/clean_driver.h"
#include "tests/test.h"

namespace baton::gpudirect {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

std::string refusal(const absl::StatusOr<Driver>& driver) {
  EXPECT_EQ(driver.status().code(), absl::StatusCode::kUnavailable) << driver.status();
  EXPECT_THAT(std::string(driver.status().message()), Not(HasSubstr("\n")));
  return std::string(driver.status().message());
}

TEST(DriverTable, AMachineWithoutADriverSaysSo) {
  EXPECT_THAT(refusal(load_driver("libbaton-has-no-such-driver.so.1")),
              AllOf(HasSubstr("no CUDA driver"), HasSubstr("install NVIDIA's")));
}

TEST(DriverTable, ALibraryThatIsNoDriverSaysSo) {
  EXPECT_THAT(refusal(load_driver("libc.so.6")), HasSubstr("no cuGetProcAddress"));
}

TEST(DriverTable, TheOldestDriverThatWillDoIsOf11Point3) {
  const auto beside = std::filesystem::read_symlink("/proc/self/exe").replace_filename(OLD_CUDA);
  const auto driver = must(load_driver(beside.c_str()));
  EXPECT_EQ(driver.version, 11030);
  EXPECT_NE(driver.cuFlushGPUDirectRDMAWrites, nullptr);
  EXPECT_EQ(driver.cuMemGetHandleForAddressRange, nullptr) << "of 11.7";
}

TEST(DriverTable, EveryEntryIsAskedForAsOfTheVersionItIsCalledBy) {
  CleanDriver fake;
  const auto driver = must(load_driver(FakeDriver::get_proc_address()));
  EXPECT_EQ(driver.version, 13000);
  EXPECT_NE(driver.cuMemGetHandleForAddressRange, nullptr);
}

TEST(DriverTable, AnOldDriverIsRefusedWithWhatItLacks) {
  FakeDriver fake({.version = 10010});
  EXPECT_THAT(refusal(load_driver(FakeDriver::get_proc_address())),
              AllOf(HasSubstr("CUDA driver (10.1)"), HasSubstr("cuMemCreate as of CUDA 10.2"),
                    HasSubstr("11.3 or newer")));
}

TEST(DriverTable, MissingEntriesAreNamed) {
  FakeDriver fake({.missing = {"cuMemCreate", "cuEventQuery"}});
  EXPECT_THAT(refusal(load_driver(FakeDriver::get_proc_address())),
              HasSubstr("lacks cuMemCreate, cuEventQuery"));
}

TEST(DriverTable, NoDeviceAndABrokenDriverHaveTheirRemedies) {
  for (const auto& [result, remedy] :
       {std::pair{kNoDevice, "CUDA_VISIBLE_DEVICES"}, std::pair{kSystemDriverMismatch, "reboot"},
        std::pair{kUnknown, "nvidia-smi"}}) {
    FakeDriver fake({.init = result});
    EXPECT_THAT(refusal(load_driver(FakeDriver::get_proc_address())), HasSubstr(remedy));
  }
}

TEST(DriverTable, WhatTheDriverSaysBecomesAStatus) {
  FakeDriver fake;
  const Driver driver = FakeDriver::driver();
  EXPECT_TRUE(driver_status(driver, kSuccess, "x").ok());
  EXPECT_EQ(
      driver_status(driver, kOutOfMemory, "allocating 2 MiB"),
      absl::ResourceExhaustedError("allocating 2 MiB: out of memory (CUDA_ERROR_OUT_OF_MEMORY)"));
  EXPECT_EQ(driver_status(driver, kInvalidValue, "x").code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(driver_status(driver, kNotSupported, "x").code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(driver_status(driver, kNotPermitted, "x").code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(driver_status(driver, kInvalidDevice, "x").code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(driver_status(driver, kUnknown, "x").code(), absl::StatusCode::kInternal);
  const absl::Status lost = driver_status(driver, kLaunchFailed, "x");
  EXPECT_EQ(lost.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(lost.message()), HasSubstr("restart"));
  // What an assertion of somebody's kernel leaves, for one.
  for (const Result gone : {kContained, kContextIsDestroyed, kAssert, kTensorMemoryLeak}) {
    EXPECT_EQ(driver_status(driver, gone, "x").code(), absl::StatusCode::kAborted) << gone;
  }
  const absl::Status forked = driver_status(driver, kNotInitialized, "x");
  EXPECT_EQ(forked.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(forked.message()), HasSubstr("fork"));
}

}  // namespace
}  // namespace baton::gpudirect
