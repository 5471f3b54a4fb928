// Which NICs the sockets of a session are spread over. What the kernel says of routes is asked in
// tests/two_hosts.
#include "tests/test.h"
#include "transport/net/interfaces.h"
#include "transport/tcp/redial.h"

namespace baton::tcp {
namespace {

using testing::ElementsAre;

TEST(Paths, NicsThatAreMuchSlowerOrDoNotSayAreLeftOut) {
  EXPECT_THAT(fast_enough({100'000, 100'000, 1'000}), ElementsAre(true, true, false));
  EXPECT_THAT(fast_enough({1'000, 100'000}), ElementsAre(false, true));
  EXPECT_THAT(fast_enough({100'000, 50'000, 50'001}), ElementsAre(true, false, true));
  EXPECT_THAT(fast_enough({25'000, 0}), ElementsAre(true, false));
  EXPECT_THAT(fast_enough({0, 0}), ElementsAre(true, true));
  EXPECT_THAT(fast_enough({}), ElementsAre());
}

TEST(Paths, ToAPeerOfThisHostThereIsOne) {
  const auto all = *net::literal("127.0.0.1:4000,10.77.0.2:4000,[fd77::1]:4000");
  const Paths paths = paths_to(all, all[0]);
  ASSERT_EQ(paths.ways.size(), 1u);
  EXPECT_EQ(paths.ways[0].text(), "127.0.0.1:4000");
}

// A bridge that every host has: who calls it reaches himself.
TEST(Paths, NoneLeadsToThisHostItself) {
  const auto met = *net::literal("192.0.2.1:4000");  // of documentation: nobody's
  for (const auto& [interface, address] : net::own_addresses()) {
    const Paths paths = paths_to({met[0], address.at_port_of(met[0])}, met[0]);
    ASSERT_EQ(paths.ways.size(), 1u) << interface;
    EXPECT_TRUE(paths.ways[0].same_host(met[0])) << interface;
  }
}

class Losses : public testing::Test {
 protected:
  static constexpr Time kNow = std::chrono::hours(1);
  std::vector<std::string> called(size_t socket, Time now) const {
    std::vector<std::string> out;
    for (const net::Endpoint& way : sockets_.ways_of({.ways = ways_}, socket, now)) {
      out.push_back(way.text());
    }
    return out;
  }
  const std::vector<net::Endpoint> ways_ = *net::literal("10.0.0.1:9,10.1.0.1:9,10.2.0.1:9");
  CalledSockets sockets_{{}, {}};
};

TEST_F(Losses, ASocketIsCalledByItsOwnWayFirstThoughItWasLostOnce) {
  const auto own_first = ElementsAre("10.1.0.1:9", "10.2.0.1:9", "10.0.0.1:9");
  EXPECT_THAT(called(1, kNow), own_first);
  sockets_.lost_by(ways_[1], false, kNow);
  EXPECT_THAT(called(1, kNow), own_first);
}

// As where large packets vanish: it answers, and carries nothing.
TEST_F(Losses, AWayThatStallsOrLosesSocketsAgainIsCalledLastUntilThatIsForgotten) {
  sockets_.lost_by(ways_[1], true, kNow);
  EXPECT_THAT(called(1, kNow), ElementsAre("10.2.0.1:9", "10.0.0.1:9", "10.1.0.1:9"));
  EXPECT_THAT(called(0, kNow), ElementsAre("10.0.0.1:9", "10.2.0.1:9", "10.1.0.1:9"));
  const Time later = kNow + Redials::kForgotten;
  EXPECT_THAT(called(1, later), ElementsAre("10.1.0.1:9", "10.2.0.1:9", "10.0.0.1:9"));
  for (int i = 0; i < 2; ++i) sockets_.lost_by(ways_[2], false, later);
  EXPECT_THAT(called(2, later), ElementsAre("10.0.0.1:9", "10.1.0.1:9", "10.2.0.1:9"));
}

TEST_F(Losses, AfterALongPeaceTheFirstLookIsSoon) {
  sockets_.lost_by(ways_[1], true, kNow);
  sockets_.look_pause = std::chrono::seconds(30);
  sockets_.lost_by(ways_[1], true, kNow + std::chrono::seconds(30));
  EXPECT_EQ(sockets_.look_pause, Time(std::chrono::seconds(30)));
  sockets_.lost_by(ways_[2], true, kNow + 2 * Redials::kForgotten);
  EXPECT_EQ(sockets_.look_pause, Time::zero());
}

}  // namespace
}  // namespace baton::tcp
