// Devices: their facts, their context, and what a loss means.
#include "gpudirect/device.h"

#include "tests/gpudirect/fake/fake_driver.h"
#include "tests/test.h"

namespace baton::gpudirect {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

TEST(Facts, AreAskedForOnceAndPrinted) {
  FakeDriver fake;
  const Driver driver = FakeDriver::driver();
  {
    const auto device = Device::open(driver, 0);
    ASSERT_TRUE(device.ok()) << device.status();
    const uint64_t asked = fake.calls_of("cuDeviceGetAttribute");
    EXPECT_EQ(asked, kFactNames.size());
    const DeviceFacts& facts = (*device)->facts();
    EXPECT_EQ(facts.pci, "0000:1b:00.0");
    EXPECT_TRUE(facts.has(kDmaBufSupported));
    EXPECT_EQ(facts.value(kRdmaWritesOrdering), 200);
    EXPECT_EQ(fake.calls_of("cuDeviceGetAttribute"), asked);
  }
  EXPECT_THAT(fake.finish(), IsEmpty());
}

TEST(Facts, WhatAnOldDriverDoesNotKnowIsUnknown) {
  Attributes attributes = h100();
  attributes.erase(kHostAllocDmaBuf);
  FakeDriver fake({.attributes = attributes});
  const auto facts = query_facts(FakeDriver::driver(), 0);
  ASSERT_TRUE(facts.ok()) << facts.status();
  EXPECT_FALSE(facts->value(kHostAllocDmaBuf).has_value());
  EXPECT_FALSE(facts->has(kHostAllocDmaBuf));
  EXPECT_THAT(facts->json(),
              AllOf(StartsWith(R"({"ordinal": 0, "name": "Fake GPU", )"),
                    HasSubstr(R"("dma_buf": 1, )"), HasSubstr(R"("host_dma_buf": null, )"),
                    EndsWith(R"(, "writes_of_adapters": "ordered"})")));
}

TEST(Facts, MissingDevice) {
  FakeDriver fake({.devices = 2});
  for (const int ordinal : {-1, 2}) {
    const absl::Status status = Device::open(FakeDriver::driver(), ordinal).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
    EXPECT_THAT(std::string(status.message()), HasSubstr("this process sees 2"));
  }
  EXPECT_THAT(fake.finish(), IsEmpty());
}

TEST(Device, ThatIsLostStaysLost) {
  FakeDriver fake;
  const auto device = Device::open(FakeDriver::driver(), 0);
  ASSERT_TRUE(device.ok());
  EXPECT_TRUE((*device)->alive().ok());
  fake.lose();
  { EXPECT_EQ(Device::Current(**device).status().code(), absl::StatusCode::kAborted); }
  EXPECT_EQ((*device)->alive().code(), absl::StatusCode::kAborted);
  EXPECT_THAT(fake.finish(), IsEmpty());
}

// As after the application's cudaDeviceReset(): the context never comes back.
TEST(Device, WhoseContextIsGoneIsLost) {
  FakeDriver fake;
  {
    const auto device = Device::open(FakeDriver::driver(), 0);
    ASSERT_TRUE(device.ok());
    fake.fail_next("cuCtxPushCurrent", kInvalidContext);
    { EXPECT_EQ(Device::Current(**device).status().code(), absl::StatusCode::kAborted); }
    EXPECT_THAT(std::string((*device)->alive().message()), HasSubstr("lost to this process"));
  }
  EXPECT_THAT(fake.finish(), IsEmpty());
}

}  // namespace
}  // namespace baton::gpudirect
