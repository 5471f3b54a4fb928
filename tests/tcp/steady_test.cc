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
