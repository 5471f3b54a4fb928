// Devices: their facts, their context, and what a loss means.
#include "gpudirect/device.h"

#include "tests/gpudirect/fake/clean_driver.h"
#include "tests/test.h"

namespace baton::gpudirect {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(Facts, AreAskedForOnceAndPrinted) {
  CleanDriver fake;
  const Driver driver = FakeDriver::driver();
  const auto device = must(Device::open(driver, 0));
  const uint64_t asked = fake.calls_of("cuDeviceGetAttribute");
  EXPECT_EQ(asked, kFactNames.size());
  const DeviceFacts& facts = device->facts();
  EXPECT_EQ(facts.pci, "0000:1b:00.0");
  EXPECT_TRUE(facts.has(kDmaBufSupported));
  EXPECT_EQ(facts.value(kRdmaWritesOrdering), 200);
  EXPECT_EQ(fake.calls_of("cuDeviceGetAttribute"), asked);
}

TEST(Facts, WhatAnOldDriverDoesNotKnowIsUnknown) {
  Attributes attributes = h100();
  attributes.erase(kHostAllocDmaBuf);
  FakeDriver fake({.attributes = attributes});
  const auto facts = must(query_facts(FakeDriver::driver(), 0));
  EXPECT_FALSE(facts.value(kHostAllocDmaBuf).has_value());
  EXPECT_FALSE(facts.has(kHostAllocDmaBuf));
  EXPECT_THAT(facts.json(),
              AllOf(StartsWith(R"({"ordinal": 0, "name": "Fake GPU", )"),
                    HasSubstr(R"("dma_buf": 1, )"), HasSubstr(R"("host_dma_buf": null, )"),
                    EndsWith(R"(, "writes_of_adapters": "ordered"})")));
}

TEST(Facts, MissingDevice) {
  CleanDriver fake({.devices = 2});
  for (const int ordinal : {-1, 2}) {
    const absl::Status status = Device::open(FakeDriver::driver(), ordinal).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
    EXPECT_THAT(std::string(status.message()), HasSubstr("this process sees 2"));
  }
}

TEST(Device, ThatIsLostStaysLost) {
  CleanDriver fake;
  const auto device = must(Device::open(FakeDriver::driver(), 0));
  EXPECT_TRUE(device->alive().ok());
  fake.lose();
  { EXPECT_EQ(Device::Current(*device).status().code(), absl::StatusCode::kAborted); }
  EXPECT_EQ(device->alive().code(), absl::StatusCode::kAborted);
}

// As after the application's cudaDeviceReset(): the context never comes back.
TEST(Device, WhoseContextIsGoneIsLost) {
  CleanDriver fake;
  const auto device = must(Device::open(FakeDriver::driver(), 0));
  fake.fail_next("cuCtxPushCurrent", kInvalidContext);
  { EXPECT_EQ(Device::Current(*device).status().code(), absl::StatusCode::kAborted); }
  EXPECT_THAT(std::string(device->alive().message()), HasSubstr("lost to this process"));
}

}  // namespace
}  // namespace baton::gpudirect
