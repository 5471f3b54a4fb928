// Lines that are looked at before a counter rises, in memory that shm maps and would stream into.
#include "tests/test.h"
#include "tests/until.h"
#include "transport/base/copies/copy_kernel.h"
#include "transport/pool.h"
#include "transport/worker.h"

namespace baton {
namespace {

constexpr size_t kLine = 16;  // words; the last is the flag, as in LL128
constexpr size_t kLines = 600'000 / 128;
constexpr size_t kBytes = kLines * kLine * 8;

TEST(Polled, OrderedCopyCopiesEveryByte) {
  std::vector<std::byte> from(2'000), to(2'000);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 7 + 1);
  for (size_t at = 0; at < 17; ++at) {
    for (const size_t bytes : {0, 1, 7, 8, 9, 15, 16, 17, 127, 128, 129, 1'000}) {
      std::fill(to.begin(), to.end(), std::byte{0});
      base::ordered_copy(to.data() + at, from.data() + at / 2, bytes);
      EXPECT_EQ(std::memcmp(to.data() + at, from.data() + at / 2, bytes), 0) << at << " " << bytes;
      EXPECT_EQ(to[at + bytes], std::byte{0});
    }
  }
}

// Promise(nccl): A line that a device polls is never seen before its bytes are | a thread reads
//   lines of 128 bytes while transfers of 600 KB, which shm would stream past the caches, arrive
TEST(Polled, LinesAreWholeWhenTheirFlagIs) {
  const auto make = [](const char* name) {
    return Worker::create({.name = name,
                           .providers = {"shm"},
                           .key = *ClusterKey::from_bytes("a secret of the polled tests")});
  };
  auto a = make("a"), b = make("b");
  if (!a.ok()) GTEST_SKIP() << a.status();
  ASSERT_TRUE(b.ok()) << b.status();
  auto a_pool = MemoryPool::create(**a), b_pool = MemoryPool::create(**b);
  const Block out = (*a_pool)->allocate(kBytes).value(), in = (*b_pool)->allocate(kBytes).value();
  const PeerId peer = (*a)->connect((*b)->address()).value();
  const auto turn = [&] { (*a)->progress(), (*b)->progress(); };
  until([&] { return (*a)->peer_state(peer) == PeerState::kUp; }, turn);
  const TransferRequest request{.peer = peer,
                                .local = out.region,
                                .local_layout = Layout::contiguous(out.offset, kBytes),
                                .remote = (*b)->remote_region(in.region).value(),
                                .remote_layout = Layout::contiguous(in.offset, kBytes),
                                .polled = true};
  auto* const words = reinterpret_cast<uint64_t*>(out.data);
  auto* const seen = reinterpret_cast<std::atomic<uint64_t>*>(in.data);
  std::memset(in.data, 0, kBytes);
  std::atomic<uint64_t> looked{0};
  std::atomic<bool> stop{false};
  uint64_t torn = 0;
  std::thread looker([&] {
    for (uint64_t round = 1; !stop; ++round) {
      for (size_t line = 0; line < kLines; ++line) {
        // The far end first: lines there must not be whole before their own bytes either.
        auto* const at = seen + (line % 2 == 0 ? line : kLines - line) * kLine;
        while (at[kLine - 1].load(std::memory_order_acquire) < round && !stop) {
        }
        for (size_t w = 0; w + 1 < kLine && !stop; ++w) {
          torn += at[w].load(std::memory_order_relaxed) / 1'000 != round ? 1 : 0;
        }
      }
      looked = round;
    }
  });
  for (uint64_t round = 1; round <= (kSanitized ? 10u : 100u); ++round) {
    for (size_t i = 0; i < kLines * kLine; ++i) {
      words[i] = i % kLine == kLine - 1 ? round : round * 1'000 + i % 1'000;
    }
    const TransferId id = (*a)->submit(request).value();
    until([&] { return ended(*(*a)->state(id)); }, turn);
    EXPECT_TRUE((*a)->status(id).ok()) << (*a)->status(id);
    EXPECT_TRUE((*a)->release(id).ok());
    until([&] { return looked >= round; });
  }
  stop = true;
  looker.join();
  EXPECT_EQ(torn, 0u) << "words that were seen behind their line's flag";
}

}  // namespace
}  // namespace baton
