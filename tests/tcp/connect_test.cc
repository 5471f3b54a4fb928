// Getting connected, and everything that may call itself a peer and is none.
#include "tests/held_port.h"
#include "tests/tcp/raw_peer.h"
#include "tests/test.h"
#include "transport/net/acceptor.h"

namespace baton::tcp {
namespace {

TEST_F(TcpPair, PortInUse) {
  TcpNode a("a", settings());
  auto address = a.provider->listen().value();
  TcpNode b("b", settings(), "0123456789abcdef", net::split_host_port(address)->second);
  auto second = b.provider->listen();
  ASSERT_FALSE(second.ok());
  EXPECT_NE(second.status().message().find("choose another"), absl::string_view::npos);
}

TEST_F(TcpPair, QueryTellsTheWorkersAddress) {
  TcpNode a("a", settings()), b("b", settings());
  auto address = b.provider->listen();
  b.provider->set_worker_address("baton1:something");
  ASSERT_TRUE(a.provider->query(3, *address).ok());
  until({&a, &b}, [&] { return a.answer != nullptr; });
  ASSERT_TRUE(a.answer->ok()) << a.answer->status();
  EXPECT_EQ(**a.answer, "baton1:something");
  EXPECT_TRUE(b.rails.empty());
  EXPECT_FALSE(a.provider->query(4, "no port").ok());
  // Names are looked up beforehand, by whoever may wait.
  EXPECT_TRUE(absl::IsInvalidArgument(a.provider->query(5, "localhost:4000")));
  const auto found = a.provider->look_up("localhost:4000").value();
  EXPECT_THAT(found, testing::HasSubstr("127.0.0.1:4000"));
  EXPECT_FALSE(a.provider->look_up("no port").ok());
}

TEST(TcpProvider, BadSettingsMakeItUnavailableAndSayWhy) {
  TcpNode a("a", {{"tcp.sockets", "none"}});
  EXPECT_FALSE(a.provider->capabilities().available);
  EXPECT_NE(a.provider->capabilities().detail.find("tcp.sockets=none"), std::string::npos);
}

TEST(Endpoint, HostAndPort) {
  EXPECT_EQ(*net::split_host_port("10.0.0.1:4000"),
            std::make_pair(std::string("10.0.0.1"), uint16_t{4000}));
  EXPECT_EQ(*net::split_host_port("[::1]:80"), std::make_pair(std::string("::1"), uint16_t{80}));
  for (const char* bad : {"", "host", "host:", ":80", "host:0", "host:70000", "::1:80", "a:b"}) {
    EXPECT_FALSE(net::split_host_port(bad).ok()) << bad;
  }
}

TEST(Endpoint, WhatIsLocal) {
  EXPECT_TRUE(net::resolve("127.0.0.1:1")->front().loopback());
  EXPECT_TRUE(net::resolve("[::1]:1")->front().loopback());
  EXPECT_TRUE(net::resolve("[::ffff:127.0.0.1]:1")->front().loopback());
  EXPECT_TRUE(net::resolve("192.168.1.1:1")->front().local_network());
  EXPECT_TRUE(net::resolve("[fd00::1]:1")->front().local_network());
  EXPECT_FALSE(net::resolve("8.8.8.8:1")->front().local_network());
  EXPECT_FALSE(net::resolve("[2001:db8::1]:1")->front().local_network());
}

TEST(TcpProvider, LoopbackAddressOfAnotherMachineIsUnreachable) {
  TcpNode a("a");
  EXPECT_TRUE(a.provider->reachable("127.0.0.1:4000", "here").ok());
  EXPECT_FALSE(a.provider->reachable("127.0.0.1:4000", "elsewhere").ok());
  EXPECT_TRUE(a.provider->reachable("10.0.0.1:4000", "elsewhere").ok());
  EXPECT_FALSE(a.provider->reachable("nonsense", "here").ok());
}

}  // namespace
}  // namespace baton::tcp
