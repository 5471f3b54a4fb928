// Aborts over tcp, and peers that read nothing. That no byte moves after the end is for
// tests/conformance/end_test.cc.
#include "tests/tcp/tcp_pair.h"

namespace baton::tcp {
namespace {

constexpr size_t kAbortedBytes = 32 << 20;
constexpr size_t kAbortedSlice = 1 << 20;

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
  std::vector<char> local = pattern(kAbortedBytes, 1), remote(kAbortedBytes, 'x');
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

}  // namespace
}  // namespace baton::tcp
