// The end of a slice is final: after it was reported, no byte of it moves on either side.
#include <poll.h>

#include "tests/tcp/tcp_pair.h"

namespace baton::tcp {
namespace {

constexpr size_t kAbortedBytes = 32 << 20;
constexpr size_t kAbortedSlice = 1 << 20;
constexpr char kPoison = 0x5A;

// Memory without the poison byte in it.
std::vector<char> clean(uint64_t seed) {
  std::vector<char> out = pattern(kAbortedBytes, seed);
  std::replace(out.begin(), out.end(), kPoison, 'p');
  return out;
}
bool poisoned(const std::vector<char>& memory) {
  return std::find(memory.begin(), memory.end(), kPoison) != memory.end();
}

// Moves a small message each way, so that everything sent before it has been dealt with.
void settle(TcpNode& a, TcpNode& b) {
  std::vector<char> none;
  for (const bool forth : {true, false}) {
    TcpNode* from = forth ? &a : &b;
    TcpNode* to = forth ? &b : &a;
    for (auto& rail : from->rails) {
      auto& t = from->transfer(Op::kWrite, none, Layout(), RemoteRegion{}, Layout());
      ASSERT_TRUE(rail->post({&t, 0, 0, 0}, *from));
      until({from, to}, [&] { return !from->done.empty() && from->done.back().transfer == t.id; });
    }
  }
}

TEST_F(TcpPair, AbortedWriteNeitherReadsNorWritesAfterItsReport) {
  TcpNode a("a", narrow("2")), b("b", narrow("2"));
  connect(a, b);
  std::vector<char> local = clean(1), remote(kAbortedBytes, 'x');
  const Layout all = Layout::contiguous(0, kAbortedBytes);
  auto& t = a.transfer(Op::kWrite, local, all, b.share(remote), all);
  Feeder feeder(a, t, kAbortedSlice);
  until({&a, &b}, [&] {
    feeder.feed();
    return b.landed.size() >= 2;
  });
  for (auto& rail : a.rails) rail->abort(t.id, a);
  EXPECT_LT(feeder.posted(), feeder.slices()) << "all was sent: nothing was there to abort";
  until({&a, &b}, [&] { return feeder.reports() == feeder.posted(); });
  for (const auto& d : a.done) {
    EXPECT_TRUE(d.status.ok() || absl::IsCancelled(d.status)) << d.status;
  }
  EXPECT_TRUE(absl::IsCancelled(feeder.result()));
  std::fill(local.begin(), local.end(), kPoison);
  const std::vector<char> then = remote;
  settle(a, b);
  EXPECT_EQ(remote, then);
  EXPECT_FALSE(poisoned(remote));
  EXPECT_TRUE(a.down.empty() && b.down.empty());
  // A slice is told to the target only if it is whole, and counted once.
  for (const auto& l : b.landed) {
    if (l.arrival.slice_bytes == 0) continue;
    EXPECT_EQ(0, std::memcmp(&remote[l.arrival.slice * kAbortedSlice],
                             &then[l.arrival.slice * kAbortedSlice], kAbortedSlice));
  }
}

// A read of tiny pieces is many requests: aborting it must not lose count of them.
TEST_F(TcpPair, ReadsCanBeAbortedOverAndOver) {
  TcpNode a("a", narrow()), b("b", narrow());
  connect(a, b);
  constexpr size_t kRow = 64, kRows = 40000;
  std::vector<char> local(kRow * kRows), remote = pattern(2 * kRow * kRows, 3);
  const RemoteRegion region = b.share(remote);
  const Layout rows = Layout::strided(0, kRows, 2 * kRow, kRow);
  const Layout packed = Layout::contiguous(0, kRow * kRows);
  for (int round = 0; round < 20; ++round) {
    auto& t = a.transfer(Op::kRead, local, packed, region, rows);
    Feeder feeder(a, t, kAbortedSlice);
    feeder.feed();
    for (int i = 0; i <= round; ++i) {
      a.progress();
      b.progress();
    }
    a.rails[0]->abort(t.id, a);
    ASSERT_EQ(feeder.reports(), feeder.posted());
  }
  auto& t = a.transfer(Op::kRead, local, packed, region, rows);
  ASSERT_TRUE(run(a, b, t, kAbortedSlice).ok());
  for (size_t i = 0; i < kRows; ++i) {
    ASSERT_EQ(0, std::memcmp(&local[i * kRow], &remote[2 * i * kRow], kRow)) << i;
  }
}

TEST_F(TcpPair, PeerThatStopsReadingIsGivenUp) {
  ManualClock clock;
  TcpNode a("a", settings(), "0123456789abcdef", 0, clock), b("b", settings());
  connect(a, b);
  std::vector<char> local = clean(1), remote(kAbortedBytes, 'x');
  const Layout all = Layout::contiguous(0, kAbortedBytes);
  auto& t = a.transfer(Op::kWrite, local, all, b.share(remote), all);
  Feeder feeder(a, t, kAbortedSlice);
  for (int i = 0; i < 1000 && a.down.empty(); ++i) {  // b never makes progress
    feeder.feed();
    while (a.progress()) {
    }
    if (i < 9) {
      EXPECT_TRUE(a.down.empty()) << "given up after " << i << " s";
    }
    clock.advance(std::chrono::seconds(1));
  }
  ASSERT_EQ(a.down.size(), 1u);
  EXPECT_TRUE(absl::IsUnavailable(a.down[0]));
  EXPECT_NE(a.down[0].message().find("no progress"), absl::string_view::npos) << a.down[0];
  EXPECT_EQ(feeder.reports(), feeder.posted());
  EXPECT_TRUE(absl::IsUnknown(feeder.result())) << "some may have landed";
  // What still lay in b's socket belongs to a connection that is gone.
  std::vector<char> before = remote;
  until({&b}, [&] { return !b.down.empty(); });
  EXPECT_EQ(remote, before);
}

// An abort waits for the target's word, and costs the others on the rail nothing.
TEST_F(TcpPair, AbortTowardsATargetThatSleepsWaitsForIt) {
  ManualClock clock;
  TcpNode a("a", settings(), "0123456789abcdef", 0, clock), b("b", settings());
  connect(a, b);
  std::vector<char> local = clean(1), remote(kAbortedBytes, 'x');
  const Layout all = Layout::contiguous(0, kAbortedBytes);
  auto& t = a.transfer(Op::kWrite, local, all, b.share(remote), all);
  Feeder feeder(a, t, kAbortedSlice);
  feeder.feed();
  while (a.progress()) {
  }
  a.rails[0]->abort(t.id, a);
  EXPECT_LT(feeder.reports(), feeder.posted()) << "what is on the wire cannot be called back";
  for (int i = 0; i < 9; ++i) {  // less than tcp.stall_ms
    clock.advance(std::chrono::seconds(1));
    while (a.progress()) {
    }
  }
  EXPECT_TRUE(a.down.empty());
  until({&a, &b}, [&] { return feeder.reports() == feeder.posted(); });
  EXPECT_TRUE(a.down.empty());
}

TEST_F(TcpPair, CloseReportsEverySliceThenTheRail) {
  TcpNode a("a", settings()), b("b", settings());
  connect(a, b);
  std::vector<char> local = clean(1), remote(kAbortedBytes, 'x');
  const Layout all = Layout::contiguous(0, kAbortedBytes);
  auto& t = a.transfer(Op::kWrite, local, all, b.share(remote), all);
  Feeder feeder(a, t, kAbortedSlice);
  feeder.feed();
  a.progress();
  a.rails[0]->close(absl::CancelledError("enough"), a);
  EXPECT_EQ(feeder.reports(), feeder.posted());
  for (const auto& d : a.done) {  // one whose bytes may be on their way, one of which none is
    EXPECT_TRUE(absl::IsUnknown(d.status) || absl::IsCancelled(d.status)) << d.status;
  }
  ASSERT_EQ(a.down.size(), 1u);
  until({&a, &b}, [&] { return b.down.size() == 1; });
  EXPECT_TRUE(absl::IsUnavailable(b.down[0])) << b.down[0];
}

}  // namespace
}  // namespace baton::tcp
