// What tcp takes from the heap: in the steady state nothing for a slice, on either side; and where
// the heap has nothing left for the buffers of a rail, that is known without an exception.
#include <atomic>
#include <cstdlib>
#include <new>
#include <numeric>

#include "tests/tcp/tcp_pair.h"
#include "transport/tcp/rail.h"

namespace {
std::atomic<uint64_t> allocations{0};
std::atomic<uint64_t> fails{0};  // the one with this number, if any
}  // namespace

// Out of line, so that the compiler does not pair malloc() with delete.
[[gnu::noinline]] void* operator new(size_t bytes) {
  const bool fail = allocations.fetch_add(1, std::memory_order_relaxed) + 1 == fails.load();
  if (void* p = fail ? nullptr : std::malloc(bytes)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, size_t) noexcept { std::free(p); }

namespace baton::tcp {
namespace {

TEST_F(TcpPair, NoAllocationPerSlice) {
  TcpNode a("a", settings("2")), b("b", settings("2"));
  connect(a, b);
  constexpr size_t kPage = 4096, kPages = 4096;
  std::vector<uint32_t> pages(kPages);
  std::iota(pages.rbegin(), pages.rend(), 0);
  std::vector<char> local = pattern(kPage * kPages, 1), remote(kPage * kPages);
  const RemoteRegion region = b.share(remote);
  const Layout paged = Layout::paged(0, pages, kPage, kPage);
  const Layout flat = Layout::contiguous(0, kPage * kPages);
  a.done.reserve(1000);
  b.landed.reserve(1000);
  const auto round = [&](TransferDescriptor& t) {
    a.done.clear();
    b.landed.clear();
    Feeder feeder(a, t, 1 << 20);
    until([&] { return feeder.finished(); },
          [&] {
            feeder.feed();
            a.progress();
            b.progress();
          });
    ASSERT_TRUE(feeder.result().ok());
  };
  auto& write = a.transfer(Op::kWrite, local, paged, region, flat);
  auto& read = a.transfer(Op::kRead, local, paged, region, flat);
  // How many reads a side has to answer at once is the kernel's to decide: for each more than ever
  // before there is one allocation, and there are not many.
  constexpr int kMostReads = 2 * static_cast<int>(TcpRail::kMaxReads);
  uint64_t before = allocations.load() - 1;
  for (int tries = 0; tries <= kMostReads && allocations.load() != before; ++tries) {
    before = allocations.load();
    for (int i = 0; i < 5; ++i) {
      round(write);
      round(read);
    }
  }
  EXPECT_EQ(allocations.load(), before);
}

TEST(RailMemory, HeapExhaustionGivesNoMemory) {
  FileBuffers buffers(RxStream::kBufferBytes);
  ASSERT_NE(RailMemory::make(buffers), nullptr);
  uint64_t before = allocations.load();
  ASSERT_NE(RailMemory::make(buffers), nullptr);
  const uint64_t needed = allocations.load() - before;
  ASSERT_GT(needed, 1u);
  for (uint64_t nth = 1; nth <= needed; ++nth) {
    fails = allocations.load() + nth;
    std::unique_ptr<RailMemory> made;
    EXPECT_NO_THROW(made = RailMemory::make(buffers)) << nth;
    fails = 0;
    EXPECT_EQ(made, nullptr) << nth;
  }
  EXPECT_NE(RailMemory::make(buffers), nullptr);
}

}  // namespace
}  // namespace baton::tcp
