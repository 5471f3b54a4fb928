// Memory that a transfer could not use is refused when it is registered.
#include "tests/test.h"
#include "tests/transport/stub_provider.h"
#include "transport/internal/device_memory.h"
#include "transport/internal/mapped.h"

namespace baton {
namespace {

using ::testing::HasSubstr;

constexpr size_t kPage = 4096;

// Three pages, of which the last may get other rights, or go.
class Pages {
 public:
  Pages()
      : data(static_cast<std::byte*>(mmap(nullptr, 3 * kPage, PROT_READ | PROT_WRITE,
                                          MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {}
  ~Pages() { munmap(data, 3 * kPage); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  void protect_last(int rights) { EXPECT_EQ(mprotect(data + 2 * kPage, kPage, rights), 0); }
  std::byte* const data;
};

absl::Status registered(Worker& worker, const Pages& pages, Access access) {
  return worker.register_memory(pages.data, 3 * kPage, access).status();
}

// Promise(memory): Memory that peers' bytes would crash is refused at registration | pages are
//   looked up among the process's mappings
TEST(Registration, ReadOnlyMemoryIsRefusedForWrites) {
  StubWorker stub;
  Pages pages;
  EXPECT_TRUE(registered(*stub.worker, pages, Access::kRemoteReadWrite).ok());
  pages.protect_last(PROT_READ);
  for (const Access access : {Access::kRemoteWrite, Access::kRemoteReadWrite}) {
    const absl::Status status = registered(*stub.worker, pages, access);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("PROT_WRITE"));
  }
  for (const Access access : {Access::kLocal, Access::kRemoteRead}) {
    EXPECT_TRUE(registered(*stub.worker, pages, access).ok());
  }
}

TEST(Registration, IsTakenBackWithTheWordOfAProviderWhoseFenceDoesNotHold) {
  StubWorker stub;
  Pages pages;
  const auto region = stub.worker->register_memory(pages.data, 3 * kPage, Access::kRemoteWrite);
  ASSERT_TRUE(region.ok());
  stub.provider->fence = absl::UnavailableError("a peer stands still in the middle of a copy");
  const absl::Status status = stub.worker->deregister_memory(*region);
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("stands still"));
  // The region is gone all the same.
  EXPECT_FALSE(stub.worker->remote_region(*region).ok());
  EXPECT_TRUE(absl::IsNotFound(stub.worker->deregister_memory(*region)));
}

TEST(Registration, UnreadableOrUnmappedMemoryIsRefused) {
  StubWorker stub;
  Pages pages;
  pages.protect_last(PROT_NONE);
  for (const Access access : {Access::kLocal, Access::kRemoteRead, Access::kRemoteReadWrite}) {
    const absl::Status status = registered(*stub.worker, pages, access);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("PROT_READ"));
  }
  auto* const nowhere = reinterpret_cast<std::byte*>(kPage);  // below what may be mapped
  EXPECT_THAT(std::string(stub.worker->register_memory(nowhere, kPage).status().message()),
              HasSubstr("nothing is mapped"));
  EXPECT_EQ(stub.worker->register_memory(pages.data, SIZE_MAX).status().code(),
            absl::StatusCode::kInvalidArgument);
}

// What it says is what is so without it, and of the moment that it was made; other threads look
// for themselves.
TEST(Registration, OneLookAtTheMappingsServesManyRanges) {
  const auto map = [] {
    return static_cast<char*>(
        mmap(nullptr, 4 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  };
  char* const old = map();
  ASSERT_EQ(mprotect(old + kPage, kPage, PROT_READ), 0);
  ASSERT_EQ(mprotect(old + 2 * kPage, kPage, PROT_NONE), 0);
  std::vector<absl::StatusOr<internal::Mapped>> alone, together;
  const auto look = [&](auto& out) {
    for (const Access access : {Access::kRemoteRead, Access::kRemoteReadWrite}) {
      for (size_t from = 0; from < 4 * kPage; from += kPage / 2) {
        for (size_t size : {size_t{1}, kPage / 2, kPage, 2 * kPage}) {
          if (from + size > 4 * kPage) continue;
          out.push_back(internal::check_mapped(old + from, size, access));
        }
      }
    }
  };
  look(alone);
  char* later = nullptr;
  {
    const internal::OneLookAtMappings seen;
    const uint64_t before = internal::looks_at_mappings();
    look(together);
    later = map();
    EXPECT_TRUE(absl::IsInvalidArgument(
        internal::check_mapped(later, kPage, Access::kRemoteRead).status()));
    EXPECT_EQ(internal::looks_at_mappings(), before);
    std::thread([&] {
      EXPECT_TRUE(internal::check_mapped(later, kPage, Access::kRemoteRead).ok());
    }).join();
  }
  EXPECT_TRUE(internal::check_mapped(later, kPage, Access::kRemoteRead).ok());
  ASSERT_EQ(alone.size(), together.size());
  size_t good = 0;
  for (size_t i = 0; i < alone.size(); ++i) {
    EXPECT_EQ(alone[i].status(), together[i].status());
    if (!alone[i].ok()) continue;
    ++good;
    EXPECT_EQ(alone[i]->writable, together[i]->writable);
  }
  EXPECT_GT(good, 10u);
  EXPECT_LT(good, alone.size());
  munmap(old, 4 * kPage);
  munmap(later, 4 * kPage);
}

TEST(Registration, ReadOnlyMemoryIsNoPlaceToReadInto) {
  StubWorker stub;
  Pages pages;
  pages.protect_last(PROT_READ);
  const auto region = stub.worker->register_memory(pages.data, 3 * kPage, Access::kLocal).value();
  TransferRequest request{.op = Op::kRead,
                          .peer = stub.peer,
                          .local = region,
                          .local_layout = Layout::contiguous(0, kPage),
                          .remote = {.size = kPage, .generation = 1, .access = Access::kRemoteRead},
                          .remote_layout = Layout::contiguous(0, kPage)};
  const auto id = stub.worker->submit(request).value();
  const absl::Status status = stub.worker->wait(id, patient(std::chrono::seconds(60)));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_TRUE(stub.worker->deregister_memory(region).ok());
}

// Says that memory which nobody may touch is a device's.
class DevicePages final : public internal::DeviceMemory {
 public:
  DevicePages() {
    pages.protect_last(PROT_NONE);
    internal::use_device_memory(this);
  }
  ~DevicePages() override { internal::use_device_memory(nullptr); }
  DevicePages(const DevicePages&) = delete;
  DevicePages& operator=(const DevicePages&) = delete;
  absl::StatusOr<MemoryPlace> place(const void* data, size_t) const override {
    if (data == nullptr) return absl::InvalidArgumentError("no memory");
    return data == pages.data ? MemoryPlace{MemoryKind::kDevice, 3} : MemoryPlace{};
  }
  absl::StatusOr<BackingFile> dma_buf(const void*, size_t) const override {
    return absl::UnimplementedError("the driver has no dma-bufs");
  }
  Pages pages;
};

// Promise(devices): The CPU never touches registered device memory | the driver is asked at
//   registration; copies get no address
TEST(Registration, CpuProvidersRefuseDeviceMemory) {
  StubWorker stub;
  const DevicePages device;
  const absl::Status status = registered(*stub.worker, device.pages, Access::kRemoteReadWrite);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  for (const char* said : {"stub moves bytes by the CPU", "CUDA device 3", "has no dma-bufs"}) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(said));
  }
  // The host's is not disturbed by it.
  const Pages host;
  const auto region = stub.worker->register_memory(host.data, 3 * kPage).value();
  EXPECT_EQ(region.place.kind, MemoryKind::kHost);
}

TEST(Registration, DeviceMemoryReportsItsLocation) {
  StubWorker stub;
  const DevicePages device;
  stub.provider->reaches_devices = true;
  const auto region = stub.worker->register_memory(device.pages.data, 3 * kPage).value();
  EXPECT_EQ(region.place, (MemoryPlace{MemoryKind::kDevice, 3}));
  EXPECT_TRUE(stub.worker->deregister_memory(region).ok());
}

TEST(Registration, MemoryWithADmaBufIsADevices) {
  StubWorker stub;
  Pages pages;
  const absl::Status status =
      stub.worker->register_memory(pages.data, kPage, Access::kLocal, {.dma_buf = true}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
}

// What a provider would do that asks for an address to copy to.
TEST(Registration, ADeviceAddressIsNeverSent) {
  RegionTable table(WorkerUid::random());
  Pages pages;
  auto entry = table.add(pages.data, 3 * kPage, Access::kRemoteReadWrite, {}).value();
  entry->place = {MemoryKind::kDevice, 0};
  const auto at = [&](Access want) {
    return table.resolve(entry->index, entry->generation, entry->key, want, 0, kPage).status();
  };
  EXPECT_TRUE(absl::IsFailedPrecondition(at(Access::kRemoteWrite))) << at(Access::kRemoteWrite);
  EXPECT_TRUE(absl::IsFailedPrecondition(at(Access::kRemoteRead)));
  EXPECT_TRUE(at(Access::kLocal).ok());
}

}  // namespace
}  // namespace baton
