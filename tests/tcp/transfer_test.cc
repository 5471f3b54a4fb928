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

}  // namespace
}  // namespace baton::tcp
