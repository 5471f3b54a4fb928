// Memory of devices between two processes of one machine, mapped and not staged.
#include "tests/gpudirect/ipc/device_end.h"
#include "tests/std.h"

namespace baton {
namespace {

// From the first look at the peer's memory on, one call after the other fails.
TEST(CudaIpc, WhicheverCallFailsTheTransferEndsAndTheNextOneWorks) {
  size_t failed = 0;
  size_t staged = 0;
  for (uint64_t k = 1; k <= 40; ++k) {
    SCOPED_TRACE(k);
    gpudirect::CleanFake fake({.seed = k});
    const MappedPair two(fake);
    const Layout all = Layout::contiguous(0, 600'000);
    fake.fake().fail_call_in(k, gpudirect::kOutOfMemory);
    const absl::Status status = two.run(two.request(Op::kWrite, all, all));
    fake.fake().fail_call_in(0, gpudirect::kSuccess);
    if (!status.ok()) {
      ++failed;
      EXPECT_THAT(std::string(status.message()), testing::HasSubstr("CUDA_ERROR_OUT_OF_MEMORY"));
    }
    const absl::Status next = two.run(two.request(Op::kWrite, all, all));
    EXPECT_TRUE(next.ok()) << next;
    if (two.a.worker->stats().staged_transfers > 0) {
      ++staged;
      EXPECT_THAT(two.a.worker->explain(two.a.peer), testing::HasSubstr("no CUDA IPC: "));
    }
  }
  EXPECT_GT(failed, 3u);
  EXPECT_GT(staged, 3u);
}

// Pages in another order: one launch where a kernel costs least, unless kernels are off.
TEST(CudaIpc, SmallPagesGoTheWayThatCostsLeast) {
  constexpr size_t kSmallPage = 4096;
  for (const bool kernels : {true, false}) {
    SCOPED_TRACE(kernels);
    gpudirect::CleanFake fake({},
                              {.kernels = gpudirect::FakeDriver::image(),
                               .table = gpudirect::costs_that_favour(gpudirect::CopyWay::kKernel)});
    const MappedPair two(fake, {{"staging.kernels", kernels ? "on" : "off"}});
    const std::vector<uint32_t> from = {7, 2, 90, 33, 1, 64, 12, 13},
                                to = {5, 0, 8, 1, 77, 3, 21, 9};
    for (const uint32_t page : from) {
      std::fill_n(two.a.view() + page * kSmallPage, kSmallPage, static_cast<std::byte>(page));
    }
    const auto copies = fake.fake().calls_of("cuMemcpyAsync");
    const auto launches = fake.fake().calls_of("cuLaunchKernel");
    const absl::Status status =
        two.run(two.request(Op::kWrite, Layout::paged(0, from, kSmallPage, kSmallPage),
                            Layout::paged(0, to, kSmallPage, kSmallPage)));
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(two.a.worker->stats().staged_transfers, 0u);
    for (size_t i = 0; i < from.size(); ++i) {
      const std::byte* const page = two.b.view() + to[i] * kSmallPage;
      EXPECT_EQ(page[0], static_cast<std::byte>(from[i])) << i;
      EXPECT_EQ(page[kSmallPage - 1], static_cast<std::byte>(from[i])) << i;
    }
    EXPECT_EQ(fake.fake().calls_of("cuLaunchKernel") - launches, kernels ? 1u : 0u);
    EXPECT_EQ(fake.fake().calls_of("cuMemcpyAsync") == copies, kernels);
  }
}

TEST(CudaIpc, ADeviceWithoutAccessToItsPeerIsNamed) {
  for (const bool access : {true, false}) {
    gpudirect::CleanFake fake({.devices = 2, .peer_access = access});
    const auto buffer = *internal::device_memory()->allocate(0, gpudirect::kMiB);
    const auto shared = must(internal::device_memory()->share(buffer->data(), gpudirect::kMiB));
    const auto mapped = internal::device_memory()->map(shared);
    close(shared.fd);
    ASSERT_TRUE(mapped.ok()) << mapped.status();
    EXPECT_TRUE((*mapped)->reached_by(0).ok());
    const absl::Status other = (*mapped)->reached_by(1);
    EXPECT_EQ(other.ok(), access);
    if (!access) {
      EXPECT_THAT(std::string(other.message()),
                  testing::HasSubstr("device 1 has no peer access to device 0"));
    }
  }
}

// What a peer shares is mapped in a round of progress, where no module may be loaded: that waits
// for kernels that run, and they may wait for the round.
TEST(CudaIpc, MemoryOfAnUnusedDeviceIsMappedWithoutKernels) {
  const gpudirect::CudaMemory::Options with_kernels{.kernels = gpudirect::FakeDriver::image(),
                                                    .table = gpudirect::CopyTable{},
                                                    .root = "/nowhere"};
  gpudirect::CleanFake fake({.devices = 2}, with_kernels);
  const gpudirect::Driver driver = gpudirect::FakeDriver::driver();
  // As another process has it.
  const gpudirect::CudaMemory other([&] { return &driver; }, with_kernels);
  const auto buffer = *other.allocate(1, gpudirect::kMiB);
  const auto shared = must(other.share(buffer->data(), gpudirect::kMiB));
  const auto loaded = [&] { return fake.fake().calls_of("cuModuleLoadData"); };
  const uint64_t before = loaded();
  {
    const auto mapped = fake.memory().map(shared);
    close(shared.fd);
    ASSERT_TRUE(mapped.ok()) << mapped.status();
    EXPECT_EQ(loaded(), before);
  }
  // For memory of its own it has them, once.
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(fake.memory().place(buffer->data(), gpudirect::kMiB).ok());
    EXPECT_EQ(loaded(), before + 1);
  }
}

}  // namespace
}  // namespace baton
