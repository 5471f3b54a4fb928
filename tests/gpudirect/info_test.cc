// What `baton info` prints of CUDA devices.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "bench/doctor/info.h"
#include "bench/doctor/info_cuda.h"
#include "tests/gpudirect/fake/fake_driver.h"

namespace baton::bench {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(InfoCuda, EachDeviceWithItsFacts) {
  gpudirect::Attributes attributes = gpudirect::h100();
  attributes.erase(gpudirect::kHostAllocDmaBuf);
  gpudirect::FakeDriver fake({.devices = 2, .attributes = attributes});
  const gpudirect::Driver driver = gpudirect::FakeDriver::driver();
  const Json cuda = cuda_info(&driver);
  EXPECT_EQ(cuda["driver"], "13.0");
  ASSERT_EQ(cuda["devices"].size(), 2u);
  EXPECT_EQ(cuda["devices"][1]["pci"], "0000:1b:01.0");
  EXPECT_EQ(cuda["devices"][0]["rdma_writes_ordering"], 200);
  EXPECT_TRUE(cuda["devices"][0]["host_dma_buf"].is_null());
  const std::string text =
      info_text(collect_info(SystemRoot("/nowhere"), Json::array(), cuda_info(&driver)));
  EXPECT_THAT(text, AllOf(HasSubstr("CUDA 13.0, device 1: Fake GPU, PCI 0000:1b:01.0"),
                          HasSubstr("dma_buf 1"), HasSubstr("host_dma_buf unknown")));
}

TEST(InfoCuda, WithoutADriverTheReason) {
  const Json cuda = cuda_info(absl::UnavailableError("no GPU memory: there is no CUDA driver"));
  EXPECT_TRUE(cuda["driver"].is_null());
  EXPECT_THAT(info_text(collect_info(SystemRoot("/nowhere"), Json::array(), cuda)),
              HasSubstr("no GPU memory: there is no CUDA driver"));
}

}  // namespace
}  // namespace baton::bench
