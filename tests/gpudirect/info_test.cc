// What `baton info` prints of CUDA devices.
#include "bench/doctor/info.h"
#include "bench/doctor/doctor.h"
#include "tests/gpudirect/fake/fake_driver.h"
#include "tests/temporary_folder.h"
#include "tests/test.h"

namespace baton::bench {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::Field;
using ::testing::HasSubstr;

TEST(InfoCuda, EachDeviceWithItsFacts) {
  gpudirect::Attributes attributes = gpudirect::h100();
  attributes.erase(gpudirect::kHostAllocDmaBuf);
  gpudirect::FakeDriver fake({.devices = 2, .attributes = attributes});
  const gpudirect::Driver driver = gpudirect::FakeDriver::driver();
  const Json cuda = cuda_info(&driver, "/nowhere");
  EXPECT_EQ(cuda["driver"], "13.0");
  ASSERT_EQ(cuda["devices"].size(), 2u);
  EXPECT_EQ(cuda["devices"][1]["pci"], "0000:1b:01.0");
  EXPECT_EQ(cuda["devices"][0]["rdma_writes_ordering"], 200);
  EXPECT_TRUE(cuda["devices"][0]["host_dma_buf"].is_null());
  const std::string text = info_text(collect_info(SystemRoot("/nowhere"), Json::array(), cuda));
  EXPECT_THAT(text, AllOf(HasSubstr("CUDA 13.0, device 1: Fake GPU, PCI 0000:1b:01.0"),
                          HasSubstr("dma_buf 1"), HasSubstr("host_dma_buf unknown")));
}

// Which way the bytes of each device take over adapters, and why the better one failed.
TEST(InfoCuda, ThePathAndItsReason) {
  struct Personality {
    gpudirect::FakeOptions options;
    const char* path;
    const char* why;
    const char* writes;
  };
  gpudirect::Attributes hopeless = gpudirect::unordered_writes();
  hopeless[gpudirect::kRdmaFlushWritesOptions] = 0;
  const Personality personalities[] = {
      {{}, "dma-buf", "", "ordered"},
      {{.attributes = gpudirect::without_dma_buf()}, "staged", "open kernel module", "ordered"},
      {{.missing = {"cuMemGetHandleForAddressRange"}}, "staged", "older than 11.7", "ordered"},
      {{.attributes = gpudirect::unordered_writes()}, "dma-buf", "", "flushed by a call"},
      {{.attributes = gpudirect::unordered_writes(), .missing = {"cuFlushGPUDirectRDMAWrites"}},
       "staged",
       "offers no flush",
       "flushed by a call"},
      {{.attributes = hopeless}, "staged", "offers no flush", "not ordered"},
  };
  for (const Personality& personality : personalities) {
    gpudirect::FakeDriver fake(personality.options);
    const gpudirect::Driver driver = gpudirect::FakeDriver::driver();
    const Json cuda = cuda_info(&driver, "/nowhere");
    const Json& device = cuda["devices"][0];
    EXPECT_EQ(device["path"], personality.path);
    EXPECT_EQ(device["why_staged"].get<std::string>().empty(), *personality.why == '\0');
    EXPECT_THAT(device["why_staged"].get<std::string>(), HasSubstr(personality.why));
    EXPECT_THAT(device["writes_of_adapters"].get<std::string>(), HasSubstr(personality.writes));
    const auto info = collect_info(SystemRoot("/nowhere"), Json::array(), cuda);
    EXPECT_THAT(info_text(info), HasSubstr(std::string("over adapters: ") + personality.path));
    const auto grade = *personality.why == '\0' ? Check::Grade::kOk : Check::Grade::kWarn;
    EXPECT_THAT(examine(info, ""),
                Contains(AllOf(Field(&Check::name, "cuda device 0"), Field(&Check::grade, grade),
                               Field(&Check::finding, HasSubstr(personality.why)))));
  }
}

TEST(InfoCuda, WithTheModuleAdaptersAreGivenAddresses) {
  TemporaryFolder machine;
  machine.file("/sys/module/nvidia_peermem/refcnt", "0");
  gpudirect::FakeDriver fake({.attributes = gpudirect::without_dma_buf()});
  const gpudirect::Driver driver = gpudirect::FakeDriver::driver();
  const Json cuda = cuda_info(&driver, machine.path());
  EXPECT_EQ(cuda["devices"][0]["path"], "nvidia-peermem");
  EXPECT_EQ(cuda["devices"][0]["why_staged"], "");
  EXPECT_THAT(info_text(collect_info(SystemRoot("/nowhere"), Json::array(), cuda)),
              HasSubstr("over adapters: nvidia-peermem, no dma-buf"));
}

TEST(InfoCuda, WithoutADriverTheReason) {
  const Json cuda = cuda_info(absl::UnavailableError("no GPU memory: there is no CUDA driver"));
  EXPECT_TRUE(cuda["driver"].is_null());
  EXPECT_THAT(info_text(collect_info(SystemRoot("/nowhere"), Json::array(), cuda)),
              HasSubstr("no GPU memory: there is no CUDA driver"));
}

}  // namespace
}  // namespace baton::bench
