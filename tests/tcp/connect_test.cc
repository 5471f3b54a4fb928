// Getting connected, and everything that may call itself a peer and is none.
#include "tests/held_port.h"
#include "tests/tcp/raw_peer.h"
#include "tests/test.h"
#include "transport/net/acceptor.h"

namespace baton::tcp {
namespace {

TEST_F(TcpPair, WrongClusterKeyIsRefusedOnBothSides) {
  TcpNode a("a", settings(), "another secret here"), b("b", settings());
  auto address = b.provider->listen();
  a.provider->connect({.session = 1, .address = *address});
  until({&a, &b}, [&] { return !a.failed.ok(); });
  EXPECT_TRUE(absl::IsPermissionDenied(a.failed)) << a.failed;
  EXPECT_NE(a.failed.message().find("cluster key"), absl::string_view::npos) << a.failed;
  EXPECT_TRUE(a.rails.empty() && b.rails.empty());
}

TEST_F(TcpPair, NoListener) {
  TcpNode a("a", settings());
  const HeldPort dead;
  const std::string address = dead.address();
  a.provider->connect({.session = 1, .address = address});
  until({&a}, [&] { return !a.failed.ok(); });
  EXPECT_NE(a.failed.message().find("refused"), absl::string_view::npos) << a.failed;
  EXPECT_NE(a.failed.message().find(address), absl::string_view::npos) << a.failed;
}

TEST_F(TcpPair, PortInUse) {
  TcpNode a("a", settings());
  auto address = a.provider->listen();
  ASSERT_TRUE(address.ok());
  TcpNode b("b", settings(), "0123456789abcdef", net::split_host_port(*address)->second);
  auto second = b.provider->listen();
  ASSERT_FALSE(second.ok());
  EXPECT_NE(second.status().message().find("choose another"), absl::string_view::npos);
}

TEST_F(TcpPair, AddressOfARestartedWorkerIsNotTakenForTheOld) {
  TcpNode a("a", settings()), b("b", settings());
  auto address = b.provider->listen();
  HelloInfo old;
  old.uid = WorkerUid::random();
  a.provider->connect({.session = 1, .address = *address, .expected = old});
  until({&a, &b}, [&] { return !a.failed.ok(); });
  EXPECT_TRUE(absl::IsFailedPrecondition(a.failed)) << a.failed;
  EXPECT_NE(a.failed.message().find("another worker answers"), absl::string_view::npos) << a.failed;
}

TEST_F(TcpPair, SecondAddressIsTriedWhenTheFirstIsDead) {
  TcpNode a("a", settings()), b("b", settings());
  const HeldPort dead;
  auto address = b.provider->listen();
  a.provider->connect({.session = 1, .address = dead.address() + "," + *address});
  until({&a, &b}, [&] { return !a.rails.empty(); });
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
  const auto found = a.provider->look_up("localhost:4000");
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_THAT(*found, testing::HasSubstr("127.0.0.1:4000"));
  EXPECT_FALSE(a.provider->look_up("no port").ok());
}

TEST_F(TcpPair, StrangersNeitherGetInNorKeepPeersOut) {
  ManualClock clock;
  TcpNode a("a", settings()), b("b", settings(), "0123456789abcdef", 0, clock);
  auto address = b.provider->listen();
  // One that talks nonsense is hung up on.
  const int talker = RawPeer::dial(*address);
  const std::string nonsense = "GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: curl/8.0\r\n\r\n";
  ASSERT_EQ(::send(talker, nonsense.data(), nonsense.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(nonsense.size()));
  until({&b}, [&] {
    char bytes[256];
    const ssize_t n = ::recv(talker, bytes, sizeof(bytes), MSG_DONTWAIT);
    return n == 0 || (n < 0 && errno == ECONNRESET);
  });
  ::close(talker);
  // Many that say nothing do not keep a real peer out ...
  std::vector<int> silent;
  for (size_t i = 0; i < net::Acceptor::kMaxHalfOpen + 20; ++i) {
    silent.push_back(RawPeer::dial(*address));
    b.progress();
  }
  a.provider->connect({.session = 1, .address = *address});
  until({&a, &b}, [&] { return !a.rails.empty() && !b.rails.empty(); });
  // ... and are hung up on in time.
  clock.advance(std::chrono::seconds(6));
  until({&b}, [&] {
    return std::all_of(silent.begin(), silent.end(), [](int fd) {
      char byte;
      return ::recv(fd, &byte, 1, MSG_DONTWAIT) >= 0 || errno == ECONNRESET;
    });
  });
  for (int fd : silent) ::close(fd);
  EXPECT_EQ(b.rails.size(), 1u);
}

TEST_F(TcpPair, SilentServerIsGivenUp) {
  ManualClock clock;
  TcpNode a("a", settings(), "0123456789abcdef", 0, clock);
  const auto listener = net::listen_on("127.0.0.1", 0, {});
  a.provider->connect({.session = 1, .address = net::local_of(*listener).text()});
  while (a.progress()) {
  }
  EXPECT_TRUE(a.failed.ok());
  clock.advance(std::chrono::seconds(6));
  until({&a}, [&] { return !a.failed.ok(); });
  EXPECT_NE(a.failed.message().find("no answer"), absl::string_view::npos) << a.failed;
  ::close(*listener);
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
