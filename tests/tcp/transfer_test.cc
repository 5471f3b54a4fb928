// Transfers over tcp rails: bytes land where they belong, once, or an error says why not.
#include <numeric>
#include <random>

#include "tests/tcp/tcp_pair.h"

namespace baton::tcp {
namespace {

TEST_F(TcpPair, RouteTellsWhatIsUsed) {
  TcpNode a("a", settings("2")), b("b", settings("2"));
  connect(a, b);
  const std::string& route = a.rails[0]->properties().route;
  EXPECT_NE(route.find("127.0.0.1:"), std::string::npos) << route;
  EXPECT_NE(route.find("2 sockets"), std::string::npos) << route;
  EXPECT_EQ(a.peer.name, "b");
  EXPECT_EQ(b.peer.name, "a");
  EXPECT_EQ(b.peer.session, 7u);
  EXPECT_EQ(b.peer.rails, 2);
}

TEST_F(TcpPair, WritesAndReadsOfEverySize) {
  TcpNode a("a", settings("2")), b("b", settings("2"));
  connect(a, b);
  for (const size_t bytes : {size_t{1}, size_t{87}, size_t{4096}, size_t{65537}, size_t{1} << 20,
                             (size_t{5} << 20) + 3}) {
    std::vector<char> local = pattern(bytes, bytes), remote(bytes);
    const RemoteRegion region = b.share(remote);
    auto& write = a.transfer(Op::kWrite, local, Layout::contiguous(0, bytes), region,
                             Layout::contiguous(0, bytes));
    ASSERT_TRUE(run(a, b, write, 1 << 20).ok());
    EXPECT_EQ(local, remote) << bytes;
    const std::vector<char> other = pattern(bytes, bytes + 1);
    std::copy(other.begin(), other.end(), remote.begin());
    auto& read = a.transfer(Op::kRead, local, Layout::contiguous(0, bytes), region,
                            Layout::contiguous(0, bytes));
    ASSERT_TRUE(run(a, b, read, 1 << 20).ok());
    EXPECT_EQ(local, remote) << bytes;
  }
}

// The rail alone, whose queues the worker's turns do not see.
TEST_F(TcpPair, ALargeSliceHasItsTurnThoughTheRailIsFullOfSmallOnes) {
  TcpNode a("a", narrow()), b("b", narrow());
  connect(a, b);
  constexpr size_t kSmall = 64 << 10, kLarge = 1 << 20, kOpen = 20, kMost = 1000;
  std::vector<char> local(kLarge), remote(kLarge);
  const RemoteRegion region = b.share(remote);
  const auto write = [&](size_t bytes) -> TransferDescriptor& {
    return a.transfer(Op::kWrite, local, Layout::contiguous(0, bytes), region,
                      Layout::contiguous(0, bytes));
  };
  size_t posted = 0;
  const auto flood = [&] {
    while (posted < a.done.size() + kOpen) {
      TransferDescriptor& small = write(kSmall);
      if (!a.rails[0]->post({&small, 0, 0, small.bytes}, a)) return;
      ++posted;
    }
  };
  flood();
  TransferDescriptor& large = write(kLarge);
  ASSERT_TRUE(a.rails[0]->post({&large, 0, 0, large.bytes}, a));
  const auto large_ended = [&] {
    return std::any_of(a.done.begin(), a.done.end(),
                       [&](const TcpNode::Done& done) { return done.transfer == large.id; });
  };
  until({&a, &b}, [&] {
    flood();
    return large_ended() || a.done.size() > kMost;
  });
  EXPECT_TRUE(large_ended()) << "it waits for the end of the small ones";
  until({&a, &b}, [&] { return a.done.size() == posted + 1; });
}

// Pages so small that one slice needs many frames, shuffled differently on both sides.
TEST_F(TcpPair, ScatteredPagesSpanFrames) {
  TcpNode a("a", settings("2")), b("b", settings("2"));
  connect(a, b);
  constexpr size_t kPage = 100, kPages = 5000;
  std::vector<uint32_t> here(kPages), there(kPages);
  std::iota(here.begin(), here.end(), 0);
  std::iota(there.begin(), there.end(), 0);
  std::shuffle(here.begin(), here.end(), std::mt19937(1));
  std::shuffle(there.begin(), there.end(), std::mt19937(2));
  const Layout local_layout = Layout::paged(0, here, kPage, kPage);
  const Layout remote_layout = Layout::paged(50, there, kPage + 7, kPage);
  std::vector<char> local = pattern(kPage * kPages, 1), remote((kPage + 7) * kPages + 50, 'x');
  const RemoteRegion region = b.share(remote);
  auto& write = a.transfer(Op::kWrite, local, local_layout, region, remote_layout);
  ASSERT_TRUE(run(a, b, write, 199999).ok());
  for (size_t i = 0; i < kPages; ++i) {
    ASSERT_EQ(0, std::memcmp(&local[here[i] * kPage], &remote[50 + there[i] * (kPage + 7)], kPage));
  }
  EXPECT_EQ(std::count(remote.begin(), remote.begin() + 50, 'x'), 50);
  const std::vector<char> sent = local;
  std::fill(local.begin(), local.end(), 'y');
  auto& read = a.transfer(Op::kRead, local, local_layout, region, remote_layout);
  ASSERT_TRUE(run(a, b, read, 199999).ok());
  EXPECT_EQ(local, sent);
}

TEST_F(TcpPair, ArrivalTellsCounterAndNotification) {
  TcpNode a("a", settings()), b("b", settings());
  connect(a, b);
  std::vector<char> local = pattern(5000, 1), remote(5000);
  auto& t = a.transfer(Op::kWrite, local, Layout::contiguous(0, 5000), b.share(remote),
                       Layout::contiguous(0, 5000));
  t.counter = {.index = 12, .generation = 3};
  t.increment = 5;
  const std::string note(kMaxNotification, 'n');
  t.notify = note;
  ASSERT_TRUE(run(a, b, t, 2000).ok());
  ASSERT_EQ(b.landed.size(), 3u);
  uint64_t bytes = 0;
  for (const auto& landed : b.landed) {
    bytes += landed.arrival.slice_bytes;
    EXPECT_EQ(landed.arrival.transfer, t.id);
    EXPECT_EQ(landed.arrival.total_bytes, 5000u);
    EXPECT_EQ(landed.arrival.counter_index, 12u);
    EXPECT_EQ(landed.arrival.counter_generation, 3);
    EXPECT_EQ(landed.arrival.increment, 5u);
    EXPECT_EQ(landed.notify, landed.arrival.slice == 2 ? note : "");
  }
  EXPECT_EQ(bytes, 5000u);
}

TEST_F(TcpPair, ZeroBytesCarryANotification) {
  TcpNode a("a", settings()), b("b", settings());
  connect(a, b);
  std::vector<char> none;
  auto& t = a.transfer(Op::kWrite, none, Layout(), RemoteRegion{}, Layout());
  t.notify = "hello";
  ASSERT_TRUE(run(a, b, t, 1 << 20).ok());
  ASSERT_EQ(b.landed.size(), 1u);
  EXPECT_EQ(b.landed[0].notify, "hello");
  auto& read = a.transfer(Op::kRead, none, Layout(), RemoteRegion{}, Layout());
  EXPECT_TRUE(run(a, b, read, 1 << 20).ok());
}

TEST_F(TcpPair, RefusedAccessTouchesNothingAndTheRailLives) {
  TcpNode a("a", settings()), b("b", settings());
  connect(a, b);
  constexpr size_t kBytes = 3 << 20;
  std::vector<char> local = pattern(kBytes, 1), remote(kBytes, 'x'), sealed(kBytes, 'x');
  const std::vector<char> local_before = local, untouched = remote;
  const RemoteRegion good = b.share(remote);
  const RemoteRegion local_only = b.share(sealed, Access::kLocal);
  const Layout all = Layout::contiguous(0, kBytes);

  struct Case {
    RemoteRegion region;
    Layout layout;
    absl::StatusCode code;
  };
  std::vector<Case> cases(4, {good, all, absl::StatusCode::kPermissionDenied});
  cases[0].region.key ^= 1;
  cases[1].region = local_only;
  cases[2].region.generation += 1;
  cases[2].code = absl::StatusCode::kNotFound;
  cases[3].layout = Layout::contiguous(kBytes - 100, kBytes);
  cases[3].code = absl::StatusCode::kOutOfRange;
  for (const Case& c : cases) {
    for (const Op op : {Op::kWrite, Op::kRead}) {
      auto& t = a.transfer(op, local, all, c.region, c.layout);
      Feeder feeder(a, t, 1 << 20);
      until({&a, &b}, [&] {
        feeder.feed();
        return feeder.finished();
      });
      EXPECT_EQ(a.done.back().status.code(), c.code) << a.done.back().status;
      EXPECT_EQ(local, local_before);
    }
  }
  EXPECT_EQ(sealed, untouched);
  // Of the last case only the slices beyond the end were refused; whole slices may have landed.
  EXPECT_TRUE(a.down.empty() && b.down.empty());
  auto& t = a.transfer(Op::kWrite, local, all, good, all);
  ASSERT_TRUE(run(a, b, t, 1 << 20).ok());
  EXPECT_EQ(local, remote);
}

// A message does not wait behind megabytes, and never tears a slice that spans frames apart.
TEST_F(TcpPair, SmallWritesOvertakeLargeOnes) {
  TcpNode a("a", narrow()), b("b", narrow());
  connect(a, b);
  constexpr size_t kBytes = 8 << 20, kRow = 512;
  std::vector<char> local = pattern(kBytes, 1), remote(2 * kBytes), none;
  auto& bulk = a.transfer(Op::kWrite, local, Layout::contiguous(0, kBytes), b.share(remote),
                          Layout::strided(0, kBytes / kRow, 2 * kRow, kRow));
  Feeder feeder(a, bulk, 1 << 20);
  feeder.feed();
  until({&a, &b}, [&] { return !b.landed.empty(); });
  auto& message = a.transfer(Op::kWrite, none, Layout(), RemoteRegion{}, Layout());
  ASSERT_TRUE(a.rails[0]->post({&message, 0, 0, 0}, a));
  until({&a, &b}, [&] {
    feeder.feed();
    return feeder.finished() && a.done.size() == feeder.slices() + 1;
  });
  ASSERT_EQ(b.landed.size(), feeder.slices() + 1);
  EXPECT_NE(b.landed.back().arrival.transfer, message.id) << "it came last";
  for (const auto& d : a.done) EXPECT_TRUE(d.status.ok()) << d.status;
  for (size_t i = 0; i < kBytes / kRow; ++i) {
    ASSERT_EQ(0, std::memcmp(&local[i * kRow], &remote[2 * i * kRow], kRow)) << i;
  }
}

TEST_F(TcpPair, BothDirectionsAtOnce) {
  TcpNode a("a", settings("2")), b("b", settings("2"));
  connect(a, b);
  constexpr size_t kBytes = 16 << 20;
  const Layout all = Layout::contiguous(0, kBytes);
  std::vector<char> a1 = pattern(kBytes, 1), a2(kBytes), b1 = pattern(kBytes, 2), b2(kBytes);
  std::vector<char> a3(kBytes), b3(kBytes);
  auto& w1 = a.transfer(Op::kWrite, a1, all, b.share(b2), all);
  auto& w2 = b.transfer(Op::kWrite, b1, all, a.share(a2), all);
  auto& r1 = a.transfer(Op::kRead, a3, all, b.share(b1), all);
  auto& r2 = b.transfer(Op::kRead, b3, all, a.share(a1), all);
  Feeder feeders[] = {{a, w1, 1 << 20}, {b, w2, 1 << 20}, {a, r1, 1 << 20}, {b, r2, 1 << 20}};
  until({&a, &b}, [&] {
    bool finished = true;
    for (Feeder& f : feeders) {
      f.feed();
      finished &= f.finished();
    }
    return finished;
  });
  for (Feeder& f : feeders) EXPECT_TRUE(f.result().ok()) << f.result();
  EXPECT_EQ(b2, a1);
  EXPECT_EQ(a2, b1);
  EXPECT_EQ(a3, b1);
  EXPECT_EQ(b3, a1);
}

}  // namespace
}  // namespace baton::tcp
