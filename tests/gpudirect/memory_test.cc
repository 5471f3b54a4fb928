// Device memory of our own and of others.
#include "gpudirect/device_memory.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>

#include "gpudirect/contract/staging.h"
#include "gpudirect/registered_pages.h"
#include "tests/gpudirect/fake/clean_driver.h"
#include "tests/test.h"

namespace baton::gpudirect {
namespace {

using ::testing::HasSubstr;

struct Opened {
  explicit Opened(FakeOptions options = {}) : fake(std::move(options)) {}
  CleanDriver fake;
  const std::unique_ptr<Device> device = *Device::open(FakeDriver::driver(), 0);
};

TEST(DeviceSlab, IsMappedAndGivenBackWhole) {
  Opened opened;
  const auto slab = must(DeviceSlab::create(*opened.device, 3 * kMiB));
  EXPECT_EQ(slab->span().size, 4 * kMiB);
  EXPECT_TRUE(slab->rdma());
  EXPECT_TRUE(slab->shareable());
  opened.fake.write(slab->span().data + 5, "bytes");
  EXPECT_EQ(opened.fake.read(slab->span().data + 5, 5), "bytes");
}

TEST(DeviceSlab, AsksForNothingThatTheDeviceCannot) {
  Attributes attributes = h100();
  attributes[kRdmaWithVirtualMemory] = attributes[kHandleTypePosixFd] = 0;
  Opened opened({.attributes = attributes});
  const auto slab = must(DeviceSlab::create(*opened.device, kMiB));
  EXPECT_FALSE(slab->rdma());
  EXPECT_FALSE(slab->shareable());
}

TEST(DeviceSlab, NoSlabWithoutVirtualMemoryOrBytes) {
  {
    Opened opened({.attributes = without_virtual_memory()});
    EXPECT_EQ(DeviceSlab::create(*opened.device, kMiB).status().code(),
              absl::StatusCode::kUnimplemented);
  }
  Opened other;
  for (const size_t bytes : {size_t{0}, SIZE_MAX}) {
    EXPECT_EQ(DeviceSlab::create(*other.device, bytes).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
}

TEST(DeviceSlab, ALostDeviceIsRefusedAtOnce) {
  Opened opened;
  const auto slab = DeviceSlab::create(*opened.device, kMiB);
  opened.fake.lose();
  EXPECT_EQ(DeviceSlab::create(*opened.device, kMiB).status().code(), absl::StatusCode::kAborted);
  const uint64_t calls = opened.fake.calls();
  EXPECT_EQ(DeviceSlab::create(*opened.device, kMiB).status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(opened.fake.calls(), calls);
}

// Which node pages of the host are to be on; nothing: wherever.
std::optional<int> wanted_node(const void* data) {
  int mode = -1;
  unsigned long nodes = 0;
  const long asked = syscall(SYS_get_mempolicy, &mode, &nodes, 8 * sizeof nodes + 1, data,
                             static_cast<unsigned long>(MPOL_F_ADDR));
  if (asked != 0 || mode != MPOL_PREFERRED || nodes == 0) return std::nullopt;
  return std::countr_zero(nodes);
}

TEST(HostPages, LieAtTheNodeThatTheDeviceIsAt) {
  int mode = 0;
  unsigned long nodes = 1;
  if (syscall(SYS_get_mempolicy, &mode, nullptr, 0, nullptr, 0) != 0) {
    GTEST_SKIP() << "this process may not ask where its memory lies";
  }
  Opened near;
  const auto ring = PinnedRing::create(*near.device, kMiB);
  const auto pages = RegisteredPages::make(*near.device, 4096);
  ASSERT_TRUE(ring.ok() && pages.ok()) << ring.status() << pages.status();
  if (syscall(SYS_mbind, (*pages)->as<void>(), 4096, MPOL_PREFERRED, &nodes, 2, 0) != 0) {
    GTEST_SKIP() << "this process may not choose where its memory lies";
  }
  EXPECT_EQ(wanted_node((*ring)->memory().data()), 0);
  EXPECT_EQ(wanted_node((*ring)->memory().data() + kMiB - 1), 0);
}

TEST(HostPages, ADeviceWithoutANumaNodeLeavesPagesInPlace) {
  for (const int node : {-1, 63, 1 << 20}) {
    Attributes attributes = h100();
    attributes[kHostNumaId] = node;
    Opened far({.attributes = attributes});
    const auto ring = PinnedRing::create(*far.device, kMiB);
    const auto pages = RegisteredPages::make(*far.device, 4096);
    ASSERT_TRUE(ring.ok() && pages.ok()) << ring.status() << pages.status();
    EXPECT_EQ(wanted_node((*ring)->memory().data()), std::nullopt) << node;
    EXPECT_EQ(wanted_node((*pages)->as<void>()), std::nullopt) << node;
  }
}

TEST(Adopt, CutsWhereAllocationsMeet) {
  CleanDriver fake;
  const Driver driver = FakeDriver::driver();
  const DevicePointer base = fake.allocate_segments(3, 2 * kMiB);
  const auto parts = must(adopt(driver, {base + kMiB, 4 * kMiB}));
  ASSERT_EQ(parts.size(), 3u);
  EXPECT_EQ(parts[0].data, base + kMiB);
  EXPECT_EQ(parts[0].size, kMiB);
  EXPECT_EQ(parts[1].size, 2 * kMiB);
  EXPECT_EQ(parts[2].size, kMiB);
  EXPECT_EQ(adopt(driver, {base, 2 * kMiB})->size(), 1u);
  fake.free(base);
}

TEST(Adopt, RefusesWhatNoTransferCanUse) {
  FakeDriver fake({.devices = 2});
  const Driver driver = FakeDriver::driver();
  const auto refusal = [&](DevicePointer at, size_t bytes) {
    const absl::Status status = adopt(driver, {at, bytes}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return std::string(status.message());
  };
  const DevicePointer managed = fake.allocate(kMiB, 0, true);
  EXPECT_THAT(refusal(managed, kMiB), HasSubstr("cudaMalloc"));
  const DevicePointer plain = fake.allocate(kMiB, 1);
  EXPECT_THAT(refusal(plain, 64 * kMiB), HasSubstr("too long"));
  EXPECT_THAT(refusal(plain, 0), HasSubstr("not a range"));
  EXPECT_THAT(refusal(plain, SIZE_MAX), HasSubstr("not a range"));
  fake.free(plain);
  EXPECT_THAT(refusal(plain, kMiB), HasSubstr("it was freed"));
  int on_the_stack = 0;
  EXPECT_THAT(refusal(reinterpret_cast<uintptr_t>(&on_the_stack), 4),
              HasSubstr("no device memory"));
}

TEST(PointerFacts, BufferIdsAreNotUsedAgainWhereAddressesAre) {
  FakeDriver fake;
  const Driver driver = FakeDriver::driver();
  std::set<unsigned long long> seen;
  for (int i = 0; i < 8; ++i) {
    const DevicePointer at = fake.allocate(kMiB);
    EXPECT_TRUE(seen.insert(query_pointer(driver, at + 17)->buffer).second);
    fake.free(at);
  }
}

}  // namespace
}  // namespace baton::gpudirect
