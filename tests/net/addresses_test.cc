// What is listened on, what others are told of it, and what can be called of what they are told.
#include <netinet/tcp.h>

#include "tests/test.h"
#include "transport/base/unique_fd.h"
#include "transport/net/endpoint.h"
#include "transport/net/interfaces.h"

namespace baton::net {
namespace {

using testing::AllOf;
using testing::HasSubstr;

base::UniqueFd listener(const std::string& host, uint16_t port = 0) {
  auto fd = listen_on(host, port, {});
  EXPECT_TRUE(fd.ok()) << fd.status();
  return base::UniqueFd(fd.ok() ? *fd : -1);
}

bool answers(const std::string& host, uint16_t port) {
  auto to = resolve(host + ":" + std::to_string(port));
  auto fd = start_connect(to->front(), {});
  if (!fd.ok()) return false;
  const base::UniqueFd socket(*fd);
  pollfd entry{.fd = *fd, .events = POLLOUT, .revents = 0};
  int error = 1;
  socklen_t size = sizeof error;
  return poll(&entry, 1, 60'000) == 1 &&
         getsockopt(*fd, SOL_SOCKET, SO_ERROR, &error, &size) == 0 && error == 0;
}

TEST(Endpoint, HostAndPort) {
  EXPECT_EQ(*split_host_port("10.0.0.1:4000"),
            std::make_pair(std::string("10.0.0.1"), uint16_t{4000}));
  EXPECT_EQ(*split_host_port("[::1]:80"), std::make_pair(std::string("::1"), uint16_t{80}));
  for (const char* bad : {"", "host", "host:", ":80", "host:0", "host:70000", "::1:80", "a:b"}) {
    EXPECT_FALSE(split_host_port(bad).ok()) << bad;
  }
}

TEST(Endpoint, WhatIsLocal) {
  for (const char* here : {"127.0.0.1:1", "[::1]:1", "[::ffff:127.0.0.1]:1"}) {
    EXPECT_TRUE(resolve(here)->front().loopback()) << here;
  }
  EXPECT_TRUE(resolve("192.168.1.1:1")->front().local_network());
  EXPECT_TRUE(resolve("[fd00::1]:1")->front().local_network());
  EXPECT_FALSE(resolve("8.8.8.8:1")->front().local_network());
  EXPECT_FALSE(resolve("[2001:db8::1]:1")->front().local_network());
}

// Promise(network): A host or port that cannot be listened on ends the start with its name | errors
//   of `listen()` are returned by the start
TEST(Listening, WhatCannotBeIsRefusedWithItsReasonAndItsRemedy) {
  const base::UniqueFd held = listener("127.0.0.1");
  const uint16_t in_use = local_of(held.get()).port();
  struct Row {
    const char* host;
    uint16_t port;
    absl::StatusCode code;
    const char* said;
    const char* remedy;
  };
  const Row rows[] = {
      {"10.99.99.99", 0, absl::StatusCode::kInvalidArgument, "10.99.99.99", "\"*\""},
      {"2001:db8::7", 0, absl::StatusCode::kInvalidArgument, "2001:db8::7", "\"*\""},
      {"nosuch.invalid", 0, absl::StatusCode::kNotFound, "nosuch.invalid", "check the name"},
      {"0.0.0.0:7000", 0, absl::StatusCode::kInvalidArgument, "0.0.0.0:7000", "the host alone"},
      {"[::]:7000", 0, absl::StatusCode::kInvalidArgument, "[::]:7000", "the host alone"},
      {"localhost:7000", 0, absl::StatusCode::kInvalidArgument, "localhost:7000", "alone"},
      {"fe80::1%nosuch", 0, absl::StatusCode::kNotFound, "fe80::1%nosuch", "check"},
      {"127.0.0.1", in_use, absl::StatusCode::kAlreadyExists, "127.0.0.1", "choose another"},
      {"", in_use, absl::StatusCode::kAlreadyExists, "127.0.0.1", "choose another"},
      {"*", in_use, absl::StatusCode::kAlreadyExists, "", "choose another"},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(row.host);
    const auto fd = listen_on(row.host, row.port, {});
    ASSERT_FALSE(fd.ok());
    EXPECT_EQ(fd.status().code(), row.code) << fd.status();
    EXPECT_THAT(std::string(fd.status().message()),
                AllOf(HasSubstr(row.said), HasSubstr(row.remedy)));
  }
}

TEST(Listening, AStarIsEveryInterfaceByBothFamilies) {
  const base::UniqueFd all = listener("*");
  const uint16_t port = local_of(all.get()).port();
  EXPECT_TRUE(answers("127.0.0.1", port));
  const auto v6 = listen_on("::1", 0, {});
  if (!v6.ok()) GTEST_SKIP() << "no IPv6: " << v6.status();
  const base::UniqueFd alone(*v6);
  EXPECT_TRUE(answers("[::1]", port));
  const base::UniqueFd of_v4 = listener("0.0.0.0"), bracketed = listener("[::1]");
  EXPECT_FALSE(answers("[::1]", local_of(of_v4.get()).port()));
  EXPECT_TRUE(answers("[::1]", local_of(bracketed.get()).port()));
}

TEST(Advertised, IsWhatWasSaidAtThePortsThatWereSaid) {
  const base::UniqueFd here = listener("127.0.0.1");
  const std::string own = std::to_string(local_of(here.get()).port());
  struct Row {
    const char* told;
    std::string all, hosts_alone;
  };
  const Row rows[] = {
      {"203.0.113.5", "203.0.113.5:" + own, "203.0.113.5:" + own},
      {"203.0.113.5:9000", "203.0.113.5:9000", "203.0.113.5:" + own},
      {"203.0.113.5:9000,10.0.0.5", "203.0.113.5:9000,10.0.0.5:" + own,
       "203.0.113.5:" + own + ",10.0.0.5:" + own},
      {"2001:db8::7", "[2001:db8::7]:" + own, "[2001:db8::7]:" + own},
      {"[2001:db8::7]", "[2001:db8::7]:" + own, "[2001:db8::7]:" + own},
      {"[2001:db8::7]:9000", "[2001:db8::7]:9000", "[2001:db8::7]:" + own},
      {"203.0.113.5,203.0.113.5", "203.0.113.5:" + own, "203.0.113.5:" + own},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(row.told);
    const auto all = advertised_as(row.told, here.get());
    const auto hosts_alone = advertised_as(row.told, here.get(), true);
    ASSERT_TRUE(all.ok() && hosts_alone.ok()) << all.status();
    EXPECT_EQ(*all, row.all);
    EXPECT_EQ(*hosts_alone, row.hosts_alone);
  }
  for (const char* wrong : {"nosuch.invalid", "nosuch.invalid:7", "10.0.0.1:70000", "a b", ","}) {
    const auto told = advertised_as(wrong, here.get());
    EXPECT_FALSE(told.ok()) << *told;
    EXPECT_THAT(std::string(told.status().message()), HasSubstr("advertise")) << wrong;
  }
  std::string many = "10.0.0.1";
  for (int i = 2; i < 12; ++i) many += ",10.0.0." + std::to_string(i);
  EXPECT_TRUE(absl::IsInvalidArgument(advertised_as(many, here.get()).status()));
}

TEST(Advertised, AVariableHoldsForEveryDoorThatHasNoOptionAndMoreThanLoopback) {
  const base::UniqueFd all = listener("*"), loopback = listener("127.0.0.1");
  const std::string own = std::to_string(local_of(all.get()).port());
  ASSERT_EQ(setenv("BATON_ADVERTISE", "203.0.113.5:9000", 1), 0);
  EXPECT_EQ(*advertised_as("", all.get()), "203.0.113.5:9000");
  EXPECT_EQ(*advertised_as("", all.get(), true), "203.0.113.5:" + own);
  EXPECT_EQ(*advertised_as("203.0.113.6", all.get()), "203.0.113.6:" + own);
  EXPECT_EQ(*advertised_as("", loopback.get()), advertised(loopback.get()));
  ASSERT_EQ(setenv("BATON_ADVERTISE", "nosuch.invalid", 1), 0);
  EXPECT_THAT(std::string(advertised_as("", all.get()).status().message()),
              HasSubstr("BATON_ADVERTISE=\"nosuch.invalid\""));
  ASSERT_EQ(setenv("BATON_ADVERTISE", "", 1), 0);
  EXPECT_EQ(*advertised_as("", all.get()), advertised(all.get()));
  ASSERT_EQ(unsetenv("BATON_ADVERTISE"), 0);
  EXPECT_EQ(*advertised_as("", all.get()), advertised(all.get()));
}

TEST(Advertised, HostsAreSaidWithoutPorts) {
  EXPECT_EQ(hosts_of(""), "");
  EXPECT_EQ(hosts_of("10.0.0.1:7,name,[::1]:9"), "10.0.0.1,name,::1");
}

// The number of an interface means something on its own host alone.
TEST(LinkLocal, TheCallersInterfacesAreCalled) {
  const Endpoint global = literal("[2001:db8::7]:9000")->front();
  ASSERT_EQ(on_interfaces(global, nullptr).size(), 1u);
  EXPECT_EQ(on_interfaces(global, nullptr).front().text(), global.text());

  const Endpoint theirs = literal("[fe80::7]:9000")->front();
  const Endpoint called = theirs.with_scope(3);
  const auto there = on_interfaces(theirs, &called);
  ASSERT_EQ(there.size(), 1u);
  EXPECT_EQ(there.front().scope(), 3u) << "where it answered";
  EXPECT_EQ(there.front().port(), 9000);

  const Endpoint other = literal("[fe80::8]:9000")->front().with_scope(3);
  std::vector<uint32_t> expected;
  for (const auto& [name, own] : own_addresses()) {
    if (own.scope() == 0 || !own.link_local()) continue;
    if (std::find(expected.begin(), expected.end(), own.scope()) == expected.end()) {
      expected.push_back(own.scope());
    }
  }
  std::vector<uint32_t> found;
  for (const Endpoint& each : on_interfaces(theirs, &other)) found.push_back(each.scope());
  EXPECT_EQ(found, expected);
}

// It goes over loopback, though the address may be one of the internet's.
TEST(Congestion, WhatGoesToAnAddressOfThisHostIsNotPaced) {
  constexpr std::string_view kPaced = "bbr";
  const base::UniqueFd at = listener("*");
  for (const auto& [name, own] : own_addresses()) {
    if (own.link_local()) continue;
    const auto fd = start_connect(own.at_port_of(local_of(at.get())), {});
    ASSERT_TRUE(fd.ok()) << fd.status();
    const base::UniqueFd socket(*fd);
    pollfd entry{.fd = *fd, .events = POLLOUT, .revents = 0};
    ASSERT_EQ(poll(&entry, 1, 60'000), 1) << own.text();
    if (setsockopt(*fd, IPPROTO_TCP, TCP_CONGESTION, kPaced.data(), kPaced.size()) != 0) {
      GTEST_SKIP() << "the kernel has no bbr";
    }
    EXPECT_NE(tune(*fd, peer_of(*fd), {}), kPaced) << own.text();
  }
}

}  // namespace
}  // namespace baton::net
