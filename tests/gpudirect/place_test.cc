// What register_memory() makes of addresses, with the fake as the driver of this process.
#include "tests/gpudirect/fake/installed_fake.h"
#include "tests/test.h"
#include "tests/transport/stub_provider.h"

namespace baton::gpudirect {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Without kernels, and without costs of copies.
struct Machine : CleanFake {
  explicit Machine(FakeOptions options = {})
      : CleanFake(std::move(options), {.kernels = {}, .table = CopyTable{}}) {}
  static void* address(DevicePointer at) { return pointer_of<void>(at); }
};

// Promise(devices): A machine without a driver runs the same binary and loads nothing | `dlopen`,
//   only where the process already has a driver
TEST(Place, WithoutADriverAllMemoryIsTheHostsAndNothingIsLoaded) {
  const CudaMemory memory([]() -> const Driver* { return nullptr; });
  int here = 0;
  const auto place = must(memory.place(&here, sizeof here));
  EXPECT_EQ(place.kind, MemoryKind::kHost);
  EXPECT_EQ(memory.dma_buf(&here, sizeof here).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_FALSE(driver_in_process());
}

TEST(Place, CountsDevicesOrSaysWhyThereAreNone) {
  Machine machine({.devices = 2});
  EXPECT_EQ(machine.memory().count().value_or(0), 2);
  machine.fake().fail_next("cuDeviceGetCount", kOutOfMemory);
  EXPECT_THAT(std::string(machine.memory().count().status().message()),
              HasSubstr("cuDeviceGetCount"));
}

TEST(Place, HostMemoryStaysTheHostsWhateverTheDriverKnows) {
  Machine machine;
  std::vector<std::byte> host(kMiB);
  StubWorker stub;
  const auto region = must(stub.worker->register_memory(host.data(), host.size()));
  EXPECT_EQ(region.place, MemoryPlace{});
}

TEST(Place, DeviceMemoryThatNoProviderReachesIsStaged) {
  Machine machine({.devices = 2, .attributes = without_dma_buf()});
  const DevicePointer at = machine.fake().allocate(kMiB, 1);
  const auto place = must(machine.memory().place(Machine::address(at), kMiB));
  EXPECT_EQ(place, (MemoryPlace{MemoryKind::kDevice, 1}));
  {
    StubWorker stub;
    const auto region = must(stub.worker->register_memory(Machine::address(at), kMiB));
    EXPECT_EQ(region.place, place);
    const auto remote = must(stub.worker->remote_region(region));
    EXPECT_EQ(remote.kind, MemoryKind::kDevice);
    EXPECT_FALSE(remote.direct);
    EXPECT_EQ(machine.fake().calls_of("cuMemHostRegister"), 2u);  // the ring, and gates for streams
  }
  machine.fake().free(at);
}

TEST(Place, WithoutPinnedMemoryTheRegistrationSaysWhy) {
  Machine machine({.attributes = without_dma_buf()});
  const DevicePointer at = machine.fake().allocate(kMiB);
  machine.fake().fail_next("cuMemHostRegister", kOutOfMemory);
  {
    StubWorker stub;
    const absl::Status status = stub.worker->register_memory(Machine::address(at), kMiB).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(
        std::string(status.message()),
        AllOf(HasSubstr("1048576 bytes of CUDA device 0"), HasSubstr("stub moves bytes by the CPU"),
              HasSubstr("open kernel module"), HasSubstr("staging.ring_mib")));
  }
  machine.fake().free(at);
}

TEST(Place, WhatNoTransferCanUseIsRefusedInOneLine) {
  Machine machine;
  StubWorker stub;
  const auto refusal = [&](DevicePointer at, size_t bytes) {
    const absl::Status status = stub.worker->register_memory(Machine::address(at), bytes).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return std::string(status.message());
  };
  const DevicePointer managed = machine.fake().allocate(kMiB, 0, true);
  EXPECT_THAT(refusal(managed, kMiB), HasSubstr("managed"));
  const DevicePointer segments = machine.fake().allocate_segments(3, 2 * kMiB);
  EXPECT_THAT(refusal(segments + kMiB, 2 * kMiB),
              AllOf(HasSubstr("2 allocations of CUDA device 0"),
                    HasSubstr("the first ends after 1048576 bytes")));
  EXPECT_THAT(refusal(segments, 64 * kMiB), HasSubstr("too long"));
  machine.fake().free(segments);
  EXPECT_THAT(refusal(segments, kMiB), HasSubstr("register"));  // by what the kernel says
  machine.fake().free(managed);
}

TEST(Place, ADmaBufIsOfTheWholePagesAround) {
  Machine machine;
  const DevicePointer at = machine.fake().allocate(kMiB);
  const auto file = must(machine.memory().dma_buf(Machine::address(at + 4096 + 100), 8192));
  EXPECT_TRUE(file.dma_buf);
  EXPECT_EQ(file.offset, 100u);
  EXPECT_GE(file.fd, 0);
  close(file.fd);
  machine.fake().free(at);
}

TEST(Place, AFailingDriverFailsTheRegistrationAndNothingElse) {
  Machine machine;
  const DevicePointer at = machine.fake().allocate(kMiB);
  StubWorker stub;
  stub.provider->reaches_devices = true;
  ASSERT_TRUE(stub.worker->register_memory(Machine::address(at), kMiB).ok());
  machine.fake().lose();
  EXPECT_EQ(stub.worker->register_memory(Machine::address(at), kMiB).status().code(),
            absl::StatusCode::kAborted);
}

}  // namespace
}  // namespace baton::gpudirect
