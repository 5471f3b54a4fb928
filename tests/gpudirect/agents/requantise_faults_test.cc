// Plans of agents that requantise on a device, where that cannot be had, and where a call of the
// driver fails.
#include <iostream>

#include "tests/gpudirect/agents/device_pair.h"
#include "tests/sanitized.h"
#include "tests/test.h"

namespace baton::kvtransfer {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Of = Block::Of;

constexpr char kRemedy[] = "make the plan on the side whose cache is host memory";

TEST(RequantisingOnDevices, WithoutKernelsThePlanIsRefusedWithTheRemedy) {
  gpudirect::CudaMemory::Options options = with_kernels();
  options.kernels = {};
  InstalledFake driver(without_dma_buf(), options);
  {
    DevicePair pair(driver);
    const absl::Status none = pair.status(pair.source.place);
    EXPECT_TRUE(absl::IsUnimplemented(none)) << none;
    EXPECT_THAT(
        std::string(none.message()),
        AllOf(HasSubstr("no requantising kernel for CUDA device 0: no kernels: nvcc was not found"),
              HasSubstr("build again"), HasSubstr(kRemedy)));
  }
  driver.expect_clean();
}

TEST(RequantisingOnDevices, WithoutMemoryForTheSlotsThePlanIsRefusedWithTheRemedy) {
  InstalledFake driver(without_dma_buf({.memory_bytes = 64 << 20}), with_kernels());
  {
    DevicePair pair(driver, 128 << 20);
    for (int i = 0; i < 2; ++i) {
      const absl::Status full = pair.status(pair.source.place);
      EXPECT_TRUE(absl::IsResourceExhausted(full)) << full;
      EXPECT_THAT(
          std::string(full.message()),
          AllOf(HasSubstr("cannot allocate 134217728 bytes of staging memory on CUDA device 0"),
                HasSubstr("AgentOptions::staging_bytes")));
    }
  }
  driver.expect_clean();
}

TEST(RequantisingOnDevices, CachesInSeveralPlacesOrNotAlignedAreRefusedWithTheRemedy) {
  InstalledFake driver(without_dma_buf({.devices = 2}), with_kernels());
  {
    DevicePair pair(driver);
    const auto refused = [&](const KvPlacement& local) {
      const absl::Status status = pair.status(local);
      EXPECT_TRUE(absl::IsUnimplemented(status)) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(kRemedy));
      return std::string(status.message());
    };
    ASSERT_GT(pair.of.source.buffers.size(), 1u);
    DeviceCache other(*pair.a, driver, pair.of.source, Of::kDevice, 1);
    DeviceCache host(*pair.a, driver, pair.of.source, Of::kHost);
    for (const auto& [elsewhere, name] :
         {std::pair{&other, "CUDA device 1"}, std::pair{&host, "the host"}}) {
      KvPlacement mixed = pair.source.place;
      mixed.addresses[0] = elsewhere->place.addresses[0];
      mixed.layout.buffers[0] = elsewhere->place.layout.buffers[0];
      EXPECT_THAT(refused(mixed), AllOf(HasSubstr(name), HasSubstr("CUDA device 0")));
    }
    KvPlacement odd = pair.source.place;
    KvField& values = odd.layout.groups[0].fields[1];
    values.block_stride += 1;
    odd.layout.groups[0].blocks -= 1;
    EXPECT_THAT(refused(odd), HasSubstr("aligned to their size"));
    EXPECT_TRUE(pair.status(pair.source.place).ok());
  }
  driver.expect_clean();
}

// Whichever call fails from the plan's making on: it is said, or all is done, and afterwards the
// agent makes the same plan and transfer. Every seventh call; BATON_CASES=all is every one.
TEST(RequantisingOnDevices, ACallThatFailsIsSaidAndTheAgentGoesOn) {
  uint64_t calls = 0, said = 0;
  const char* const cases = std::getenv("BATON_CASES");
  const uint64_t every = cases != nullptr && std::string_view(cases) == "all" ? 1
                         : kSanitized                                         ? 41
                                                                              : 7;
  for (uint64_t k = 0; k <= calls; k += k == 0 ? 1 : every) {
    SCOPED_TRACE(testing::Message() << "call " << k);
    InstalledFake driver(without_dma_buf({.seed = k + 1}), with_kernels());
    {
      DevicePair pair(driver);
      const CacheBytes want = pair.want();
      const uint64_t before = driver.fake().calls();
      driver.fake().fail_call_in(k, gpudirect::kOutOfMemory);
      const absl::Status status = pair.run();
      driver.fake().fail_call_in(0, gpudirect::kSuccess);
      if (k == 0) {
        ASSERT_TRUE(status.ok()) << status;
        calls = driver.fake().calls() - before;
      }
      if (status.ok()) {
        EXPECT_TRUE(pair.target.bytes() == want);
      } else {
        ++said;
        EXPECT_FALSE(absl::IsDeadlineExceeded(status)) << status;
        const absl::Status again = pair.run();
        ASSERT_TRUE(again.ok()) << again << " after " << status;
        EXPECT_TRUE(pair.target.bytes() == want);
      }
    }
    driver.expect_clean();
  }
  EXPECT_GT(said, 200u / every);
  std::cout << calls << " calls, " << said << " errors said\n";
}

}  // namespace
}  // namespace baton::kvtransfer
