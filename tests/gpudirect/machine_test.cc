// This machine's own CUDA driver, where there is one: what the tests over the fake take for
// granted.
#include "gpudirect/contract/memory_place.h"
#include "gpudirect/device_memory.h"
#include "tests/gpudirect/kernel_rig.h"
#include "tests/test.h"
#include "tests/transport/stub_provider.h"

namespace baton::gpudirect {
namespace {

constexpr size_t kMiB = 1 << 20;

class OnThisMachine : public testing::Test {
 protected:
  void SetUp() override {
    const absl::StatusOr<const Driver*> driver = machine_driver();
    if (!driver.ok()) GTEST_SKIP() << driver.status().message();
    driver_ = *driver;
    device_ = must(Device::open(*driver_, 0));
  }
  const Driver* driver_ = nullptr;
  std::unique_ptr<Device> device_;
};

TEST_F(OnThisMachine, TheFacts) {
  std::printf("facts %s\n", device_->facts().json().c_str());
  EXPECT_GT(device_->facts().memory_bytes, 0u);
}

TEST_F(OnThisMachine, BytesGoToASlabAndComeBack) {
  std::vector<uint32_t> sent(16 * kMiB);
  for (size_t i = 0; i < sent.size(); ++i) sent[i] = static_cast<uint32_t>(i * 2654435761u);
  std::vector<uint32_t> back(sent.size());
  const size_t bytes = sent.size() * sizeof(uint32_t);
  KernelRig rig(*device_, bytes);
  const DevicePointer there = rig.allocate(bytes);
  rig.upload(there, sent.data(), bytes);
  rig.download(back.data(), there, bytes);
  EXPECT_TRUE(sent == back);
}

TEST_F(OnThisMachine, MemoryIsRecognised) {
  const auto slab = must(DeviceSlab::create(*device_, 2 * kMiB));
  const DeviceSpan span = slab->span();
  const auto facts = must(query_pointer(*driver_, span.data + 4096));
  EXPECT_TRUE(facts.device);
  EXPECT_FALSE(facts.managed);
  EXPECT_EQ(facts.mapping.data, span.data);
  EXPECT_EQ(facts.mapping.size, span.size);
  EXPECT_EQ(adopt(*driver_, span)->size(), 1u);
  EXPECT_FALSE(adopt(*driver_, {span.data, span.size + (size_t{1} << 30)}).ok());
  int host = 0;
  const auto other = must(query_pointer(*driver_, reinterpret_cast<uintptr_t>(&host)));
  EXPECT_FALSE(other.device);
  // A worker asks the driver that is in this process: no fake, and nothing set up by hand.
  StubWorker stub;
  stub.provider->reaches_devices = true;
  const auto region =
      must(stub.worker->register_memory(reinterpret_cast<void*>(uintptr_t{span.data}), span.size));
  EXPECT_EQ(region.place, (MemoryPlace{MemoryKind::kDevice, 0}));
}

TEST_F(OnThisMachine, ADmaBufIsMadeOrTheReasonSaid) {
  const auto slab = must(DeviceSlab::create(*device_, 2 * kMiB));
  const DeviceSpan span = slab->span();
  const CudaMemory memory([this] { return driver_; });
  const auto file = memory.dma_buf(reinterpret_cast<void*>(uintptr_t{span.data}), span.size);
  if (!file.ok()) {
    std::printf("%s\n", std::string(file.status().message()).c_str());
    EXPECT_FALSE(device_->facts().has(kDmaBufSupported) &&
                 driver_->cuMemGetHandleForAddressRange != nullptr);
    return;
  }
  EXPECT_EQ(file->offset, 0u);
  EXPECT_EQ(lseek(file->fd, 0, SEEK_END), static_cast<off_t>(span.size));
  close(file->fd);
}

}  // namespace
}  // namespace baton::gpudirect
