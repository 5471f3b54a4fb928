// This machine's own CUDA driver, where there is one: what the tests over the fake take for
// granted.
#include "gpudirect/contract/memory_place.h"
#include "gpudirect/device_memory.h"
#include "tests/test.h"
#include "tests/transport/stub_provider.h"

namespace baton::gpudirect {
namespace {

constexpr size_t kMiB = 1 << 20;
constexpr size_t kChunk = 4 * kMiB;  // no copy is larger: the engine is blind to priority

class OnThisMachine : public testing::Test {
 protected:
  void SetUp() override {
    const absl::StatusOr<const Driver*> driver = machine_driver();
    if (!driver.ok()) GTEST_SKIP() << driver.status().message();
    driver_ = *driver;
    auto device = Device::open(*driver_, 0);
    ASSERT_TRUE(device.ok()) << device.status();
    device_ = *std::move(device);
  }
  // Copies in chunks, and waits for the last.
  absl::Status copy(DevicePointer to, DevicePointer from, size_t bytes, Direction direction) {
    const Device::Current current(*device_);
    absl::Status status = current.status();
    for (size_t at = 0; status.ok() && at < bytes; at += kChunk) {
      status =
          device_->check(driver_->cuMemcpyAsync(to + at, from + at, std::min(kChunk, bytes - at),
                                                device_->stream(direction)),
                         "copying");
    }
    Result result = kNotReady;
    while (status.ok() && result == kNotReady) {
      result = driver_->cuStreamQuery(device_->stream(direction));
      if (result != kNotReady) status = device_->check(result, "waiting for copies");
    }
    return status;
  }

  const Driver* driver_ = nullptr;
  std::unique_ptr<Device> device_;
};

TEST_F(OnThisMachine, TheFacts) {
  std::printf("facts %s\n", device_->facts().json().c_str());
  EXPECT_GT(device_->facts().memory_bytes, 0u);
}

TEST_F(OnThisMachine, BytesGoToASlabAndComeBack) {
  constexpr size_t kBytes = 64 * kMiB;
  const auto slab = DeviceSlab::create(*device_, kBytes);
  ASSERT_TRUE(slab.ok()) << slab.status();
  std::vector<uint32_t> sent(kBytes / sizeof(uint32_t));
  for (size_t i = 0; i < sent.size(); ++i) sent[i] = static_cast<uint32_t>(i * 2654435761u);
  std::vector<uint32_t> back(sent.size());
  {
    const Device::Current current(*device_);
    for (auto* host : {&sent, &back}) {
      ASSERT_EQ(driver_->cuMemHostRegister(host->data(), kBytes, kHostPortable), kSuccess);
    }
  }
  const auto address = [](const std::vector<uint32_t>& host) {
    return static_cast<DevicePointer>(reinterpret_cast<uintptr_t>(host.data()));
  };
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_TRUE(copy((*slab)->span().data, address(sent), kBytes, Direction::kToDevice).ok());
  const auto middle = std::chrono::steady_clock::now();
  EXPECT_TRUE(copy(address(back), (*slab)->span().data, kBytes, Direction::kToHost).ok());
  const auto end = std::chrono::steady_clock::now();
  EXPECT_TRUE(sent == back);
  const auto rate = [](auto from, auto to) {
    return static_cast<double>(kBytes) /
           std::chrono::duration<double, std::nano>(to - from).count();
  };
  std::printf("to the device %.1f GB/s, back %.1f GB/s (64 MiB once, with its start)\n",
              rate(begin, middle), rate(middle, end));
  const Device::Current current(*device_);
  for (auto* host : {&sent, &back}) EXPECT_EQ(driver_->cuMemHostUnregister(host->data()), kSuccess);
}

TEST_F(OnThisMachine, MemoryIsRecognised) {
  const auto slab = DeviceSlab::create(*device_, 2 * kMiB);
  ASSERT_TRUE(slab.ok()) << slab.status();
  const DeviceSpan span = (*slab)->span();
  const auto facts = query_pointer(*driver_, span.data + 4096);
  ASSERT_TRUE(facts.ok()) << facts.status();
  EXPECT_TRUE(facts->device);
  EXPECT_FALSE(facts->managed);
  EXPECT_EQ(facts->mapping.data, span.data);
  EXPECT_EQ(facts->mapping.size, span.size);
  EXPECT_EQ(adopt(*driver_, span)->size(), 1u);
  EXPECT_FALSE(adopt(*driver_, {span.data, span.size + (size_t{1} << 30)}).ok());
  int host = 0;
  const auto other = query_pointer(*driver_, reinterpret_cast<uintptr_t>(&host));
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_FALSE(other->device);
  // A worker asks the driver that is in this process: no fake, and nothing set up by hand.
  StubWorker stub;
  stub.provider->reaches_devices = true;
  const auto region =
      stub.worker->register_memory(reinterpret_cast<void*>(uintptr_t{span.data}), span.size);
  ASSERT_TRUE(region.ok()) << region.status();
  EXPECT_EQ(region->place, (MemoryPlace{MemoryKind::kDevice, 0}));
}

TEST_F(OnThisMachine, ADmaBufIsMadeOrTheReasonSaid) {
  const auto slab = DeviceSlab::create(*device_, 2 * kMiB);
  ASSERT_TRUE(slab.ok()) << slab.status();
  const DeviceSpan span = (*slab)->span();
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
