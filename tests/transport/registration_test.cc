// Memory that a transfer could not use is refused when it is registered.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <string>

#include "tests/transport/stub_provider.h"

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

TEST(Registration, OfReadOnlyMemoryForWritesIsRefused) {
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

TEST(Registration, OfMemoryThatCannotBeReadOrIsNotThereIsRefused) {
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

TEST(Registration, ReadOnlyMemoryIsNoPlaceToReadInto) {
  StubWorker stub;
  Pages pages;
  pages.protect_last(PROT_READ);
  const auto region = stub.worker->register_memory(pages.data, 3 * kPage, Access::kLocal);
  ASSERT_TRUE(region.ok()) << region.status();
  TransferRequest request{.op = Op::kRead,
                          .peer = stub.peer,
                          .local = *region,
                          .local_layout = Layout::contiguous(0, kPage),
                          .remote = {.size = kPage, .generation = 1, .access = Access::kRemoteRead},
                          .remote_layout = Layout::contiguous(0, kPage)};
  const auto id = stub.worker->submit(request);
  ASSERT_TRUE(id.ok()) << id.status();
  const absl::Status status = stub.worker->wait(*id, std::chrono::seconds(60));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_TRUE(stub.worker->deregister_memory(*region).ok());
}

}  // namespace
}  // namespace baton
