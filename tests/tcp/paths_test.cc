// Which NICs the sockets of a session are spread over. What the kernel says of routes is asked in
// tests/two_hosts.
#include "transport/tcp/paths.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "transport/net/interfaces.h"

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

}  // namespace
}  // namespace baton::tcp
