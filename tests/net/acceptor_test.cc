// Acceptor, as its manual page has it: who gets in, who is kept out, and what it costs.
#include "transport/net/acceptor.h"

#include <sys/epoll.h>

#include "tests/held_port.h"
#include "tests/manual_clock.h"
#include "tests/net/plain_host.h"
#include "tests/no_descriptors.h"
#include "tests/test.h"
#include "transport/address.h"

namespace baton::net {
namespace {

using testing::AllOf;
using testing::HasSubstr;

TEST(Acceptor, BothSidesLearnThePeersIdentity) {
  Host a("a"), b("b");
  const auto address = b.provider->listen();
  ASSERT_TRUE(address.ok()) << address.status();
  a.it.rails = 3;
  a.provider->connect({.session = 7, .address = *address});
  until({&a, &b}, [&] { return a.it.met.size() == 1 && b.it.met.size() == 1; });
  const HelloInfo dialled = a.it.met[0].peer;
  const HelloInfo caller = b.it.met[0].peer;
  EXPECT_TRUE(a.it.met[0].dialled && !b.it.met[0].dialled);
  EXPECT_EQ(dialled.uid, b.self.uid);
  EXPECT_EQ(caller.uid, a.self.uid);
  for (const HelloInfo& info : {dialled, caller}) {
    EXPECT_EQ(info.session, 7u);
    EXPECT_EQ(info.rail, 0u);
    EXPECT_EQ(info.rails, 3u);
  }
  // The connection is theirs now.
  ASSERT_EQ(::send(a.it.met[0].fd, "hello", 5, MSG_NOSIGNAL), 5);
  char bytes[5] = {};
  until({&b}, [&] { return ::recv(b.it.met[0].fd, bytes, 5, MSG_DONTWAIT) == 5; });
  EXPECT_EQ(std::string(bytes, 5), "hello");
  // Another connection goes where the first did; what is told besides is asked for each time.
  a.it.acceptor.connect_another(*a.it.last_dial, dialled, 2);
  until({&a, &b}, [&] { return a.it.met.size() == 2 && b.it.met.size() == 2; });
  EXPECT_EQ(b.it.met[1].peer.rail, 2u);
  EXPECT_EQ(b.it.met[0].peer.extra, "extra 0");
  EXPECT_EQ(b.it.met[1].peer.extra, "extra 1");
  EXPECT_FALSE(a.it.acceptor.busy() || b.it.acceptor.busy());
}

TEST(Acceptor, EveryEndpointIsTriedAndNamed) {
  Host a("a"), b("b"), c("c");
  const HeldPort held;
  const std::string dead = held.address();
  const std::string first = *b.provider->listen();
  const std::string second = *c.provider->listen();
  a.it.refuses = 1;
  a.provider->connect({.session = 1, .address = dead + ",nonsense," + first + "," + second});
  until({&a, &b, &c}, [&] { return !a.it.met.empty() || !a.failed.ok(); });
  ASSERT_TRUE(a.failed.ok()) << a.failed;
  EXPECT_EQ(a.it.met[0].peer.uid, c.self.uid);
  EXPECT_THAT(a.it.last_dial->errors,
              AllOf(HasSubstr(dead + ": Connection refused"), HasSubstr("\"nonsense\" is not host"),
                    HasSubstr(first + ": not good enough")));
  a.it.refuses = 2;
  a.provider->connect({.session = 2, .address = first + "," + second});
  until({&a, &b, &c}, [&] { return !a.failed.ok(); });
  EXPECT_TRUE(absl::IsUnavailable(a.failed)) << a.failed;
  EXPECT_THAT(std::string(a.failed.message()),
              AllOf(HasSubstr("over plain failed"), HasSubstr(first + ": not good enough"),
                    HasSubstr(second + ": not good enough")));
}

TEST(Acceptor, TheAnswerMustComeFromThePeerAskedFor) {
  Host a("a"), b("b");
  const std::string address = *b.provider->listen();
  HelloInfo old;
  old.uid = WorkerUid::random();
  a.provider->connect({.session = 1, .address = address, .expected = old});
  until({&a, &b}, [&] { return !a.failed.ok(); });
  EXPECT_TRUE(absl::IsFailedPrecondition(a.failed)) << a.failed;
  EXPECT_THAT(std::string(a.failed.message()),
              AllOf(HasSubstr("another worker answers there"), HasSubstr(old.uid.hex()),
                    HasSubstr(b.self.uid.hex()), HasSubstr("ask for its address again")));
  EXPECT_TRUE(a.it.met.empty());
  a.provider->connect({.session = 2, .address = address, .expected = b.self});
  until({&a, &b}, [&] { return !a.it.met.empty(); });
}

TEST(Acceptor, AQueryIsAnsweredWithoutASession) {
  Host a("a"), b("b");
  const std::string address = *b.provider->listen();
  b.provider->set_worker_address("baton1:something");
  ASSERT_TRUE(a.provider->query(3, address).ok());
  until({&a, &b}, [&] { return a.answer != nullptr; });
  EXPECT_EQ(**a.answer, "baton1:something");
  a.answer.reset();
  const HeldPort dead;
  ASSERT_TRUE(a.provider->query(4, dead.address()).ok());
  until({&a, &b}, [&] { return a.answer != nullptr; });
  EXPECT_THAT(std::string(a.answer->status().message()),
              AllOf(HasSubstr("refused"), HasSubstr("is a worker listening there")));
  EXPECT_TRUE(absl::IsInvalidArgument(a.provider->query(5, "no port")));
  EXPECT_TRUE(a.it.met.empty() && b.it.met.empty());
  until({&a, &b}, [&] { return !b.it.acceptor.busy(); });
}

TEST(Acceptor, WhatIsRefusedBeforehandIsReportedAllTheSame) {
  Host a("a");
  a.it.acceptor.refuse({.session = 1, .address = "10.0.0.1:4000"},
                       absl::FailedPreconditionError("no such hardware"));
  EXPECT_FALSE(a.provider->arm());
  a.progress();
  EXPECT_TRUE(absl::IsFailedPrecondition(a.failed));
  EXPECT_EQ(a.failed.message(), "connecting to 10.0.0.1:4000 over plain failed; no such hardware");
  EXPECT_TRUE(a.provider->arm());
}

TEST(Acceptor, ASlotIsHeldNoLongerThanTheHandshakeTimeout) {
  ManualClock clock;
  Host b("b", clock);
  const std::string address = *b.provider->listen();
  const int silent = dial(address);
  const int slow = dial(address);
  until({&b}, [&] { return b.it.acceptor.next_timer() != kNever; });
  b.settle();
  const Time end = clock.now() + std::chrono::seconds(2);
  // A byte now and then buys no time.
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(b.it.acceptor.next_timer(), end);
    EXPECT_TRUE(b.it.acceptor.busy());
    ASSERT_EQ(::send(slow, "b", 1, MSG_NOSIGNAL), 1);
    b.settle();
    clock.advance(std::chrono::milliseconds(499));
  }
  EXPECT_FALSE(hung_up(slow) || hung_up(silent));
  clock.advance(std::chrono::milliseconds(4));
  until({&b}, [&] { return hung_up(slow) && hung_up(silent); });
  EXPECT_FALSE(b.it.acceptor.busy());
  EXPECT_EQ(b.it.acceptor.next_timer(), kNever);
  ::close(silent);
  ::close(slow);
}

TEST(Acceptor, ASilentPeerTimesOutAndTheErrorNamesTheSetting) {
  ManualClock clock;
  Host a("a", clock);
  const auto listener = listen_on("127.0.0.1", 0, {});
  a.provider->connect({.session = 1, .address = local_of(*listener).text()});
  a.settle();
  EXPECT_TRUE(a.failed.ok());
  clock.advance(std::chrono::seconds(2));
  until({&a}, [&] { return !a.failed.ok(); });
  EXPECT_THAT(std::string(a.failed.message()),
              AllOf(HasSubstr("no answer within 2 s"), HasSubstr("plain.patience")));
  ::close(*listener);
}

// Goes on with a client's handshake over `fd` until `server` has met it.
void join(Handshake& handshake, int fd, Host& server) {
  std::string in;
  until({&server}, [&] {
    go_on(handshake, fd, in);
    return !server.it.met.empty();
  });
}

// Promise(security): A flood of tcp callers keeps no peer out | the oldest call of the busiest host
//   that has not named our key is dropped
TEST(Acceptor, AHostThatFloodsPushesOutItsOwnCalls) {
  Host b("b");
  const std::string address = *b.provider->listen();
  // Half way through its handshake, and the oldest call of all.
  Handshake handshake(Handshake::Role::kClient, b.key, {.uid = WorkerUid::random(), .name = "raw"});
  const int honest = dial(address);
  ASSERT_EQ(::send(honest, handshake.to_send().data(), 10, MSG_NOSIGNAL), 10);
  handshake.sent(10);
  until({&b}, [&] { return b.it.acceptor.busy(); });
  std::vector<int> strangers;
  for (size_t i = 0; i < 3 * Acceptor::kMaxHalfOpen; ++i) {
    strangers.push_back(dial(address, "127.0.0.2"));
    b.progress();
  }
  b.settle();
  EXPECT_FALSE(hung_up(honest));
  const auto gone = std::count_if(strangers.begin(), strangers.end(), hung_up);
  EXPECT_EQ(static_cast<size_t>(gone), 2 * Acceptor::kMaxHalfOpen + 1);
  EXPECT_TRUE(hung_up(strangers.front()) && !hung_up(strangers.back()));
  join(handshake, honest, b);
  for (const int fd : strangers) ::close(fd);
  ::close(honest);
}

// A worker that is flooded may hang up on a peer that has not come to speak yet.
TEST(Acceptor, ACallerClosedBeforeItsFirstFrameCallsAgain) {
  Host a("a");
  const auto listener = listen_on("127.0.0.1", 0, {});
  Handshake answer(Handshake::Role::kServer, a.key, {.uid = WorkerUid::random(), .name = "raw"});
  int calls = 0;
  for (const int answered : {Acceptor::kCalls, 0}) {
    calls = 0;
    a.failed = absl::OkStatus();
    a.provider->connect({.session = 1, .address = local_of(*listener).text()});
    int caller = -1;
    until({&a}, [&] {
      const int fd = ::accept4(*listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
      if (fd < 0) return !a.failed.ok();
      if (++calls == answered) caller = fd;
      if (caller < 0) ::close(fd);
      return caller >= 0;
    });
    EXPECT_EQ(calls, Acceptor::kCalls);
    if (caller < 0) continue;
    join(answer, caller, a);
    ::close(caller);
  }
  EXPECT_THAT(std::string(a.failed.message()), HasSubstr("is a worker listening there"));
  ::close(*listener);
}

// On one machine all have one address, peers and whoever floods.
TEST(Acceptor, AFloodPushesOutNoPeerOfTheSameHostThatHasBegunToSpeak) {
  Host b("b");
  const std::string address = *b.provider->listen();
  Handshake handshake(Handshake::Role::kClient, b.key, {.uid = WorkerUid::random(), .name = "raw"});
  const int honest = dial(address);
  const std::string opening(handshake.to_send());
  ASSERT_EQ(::send(honest, opening.data(), opening.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(opening.size()));
  handshake.sent(opening.size());
  pollfd answer{honest, POLLIN, 0};
  until({&b}, [&] { return ::poll(&answer, 1, 0) == 1; });
  std::vector<int> strangers;
  for (size_t i = 0; i < 3 * Acceptor::kMaxHalfOpen; ++i) {
    strangers.push_back(dial(address));
    b.progress();
  }
  b.settle();
  EXPECT_TRUE(hung_up(strangers.front()) && !hung_up(strangers.back()));
  join(handshake, honest, b);
  for (const int fd : strangers) ::close(fd);
  ::close(honest);
}

// Recorded first messages name a key too; they take places from nobody but each other.
TEST(Acceptor, WhereAllHaveNamedAKeyTheOldestMakesRoom) {
  const Endpoint here = resolve("127.0.0.1:1")->front(), there = resolve("127.0.0.2:1")->front();
  EXPECT_EQ(caller_to_drop({{&there, true}, {&here, true}, {&here, true}}), 1U);
  EXPECT_EQ(caller_to_drop({{&there, false}, {&here, true}, {&here, false}}), 2U);
  EXPECT_EQ(caller_to_drop({{&there, false}, {&here, true}, {&here, true}}), 1U);
}

bool readable(int fd) {
  pollfd one{fd, POLLIN, 0};
  return ::poll(&one, 1, 0) == 1;
}

TEST(Acceptor, RunningOutOfDescriptorsCostsTimeAndNoSpinning) {
  ManualClock clock;
  Host a("a"), b("b", clock);
  const std::string address = *b.provider->listen();
  a.provider->connect({.session = 1, .address = address});
  {
    const NoDescriptors none;
    until({&a, &b}, [&] { return b.provider->next_timer() != kNever; });
    // Somebody waits, and b sleeps nevertheless, until its timer.
    EXPECT_EQ(b.provider->next_timer(), clock.now() + Acceptor::kLookAway);
    EXPECT_TRUE(b.provider->arm());
    EXPECT_FALSE(readable(b.provider->wait_fd()));
    clock.advance(Acceptor::kLookAway - std::chrono::nanoseconds(1));
    EXPECT_FALSE(b.progress());
    EXPECT_FALSE(readable(b.provider->wait_fd()));
    // It looks again, once, and away again.
    clock.advance(std::chrono::nanoseconds(1));
    b.progress();
    EXPECT_TRUE(readable(b.provider->wait_fd()));
    b.progress();
    EXPECT_EQ(b.provider->next_timer(), clock.now() + Acceptor::kLookAway);
    EXPECT_FALSE(readable(b.provider->wait_fd()));
    EXPECT_TRUE(b.it.met.empty());
  }
  // Who waited gets in.
  clock.advance(Acceptor::kLookAway);
  until({&a, &b}, [&] { return !a.it.met.empty() && !b.it.met.empty(); });
  // One that cannot dial says what is missing.
  const NoDescriptors none;
  a.provider->connect({.session = 2, .address = address});
  a.progress();
  EXPECT_THAT(std::string(a.failed.message()),
              AllOf(HasSubstr("Too many open files"), HasSubstr("ulimit -n")));
}

TEST(Acceptor, LoopbackAddressesAreOfThisMachineOnly) {
  EXPECT_TRUE(reachable("127.0.0.1:4000,[::1]:4000", "here", "here").ok());
  EXPECT_TRUE(reachable("localhost:4000", "", "here").ok());
  EXPECT_TRUE(reachable("127.0.0.1:4000,10.0.0.1:4000", "there", "here").ok());
  for (const char* loopback : {"127.0.0.1:4000", "127.1.2.3:4000,[::1]:4000", "localhost:4000"}) {
    const absl::Status status = reachable(loopback, "there", "here");
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << loopback;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("listen_host"), HasSubstr("link-local")));
  }
  EXPECT_TRUE(absl::IsInvalidArgument(reachable("nonsense", "here", "here")));
}

TEST(Acceptor, LoopbackAddressesAreOfAllUsersAndProcessNamespacesOfAMachine) {
  const std::string here = this_host_id();
  const std::string machine = here.substr(0, here.find('/'));
  const std::string network = here.substr(0, here.find('/', machine.size() + 1));
  EXPECT_TRUE(reachable("127.0.0.1:4000", network + "/4026531836/65534", here).ok());
  EXPECT_FALSE(reachable("127.0.0.1:4000", machine + "/1/4026531836/0", here).ok());
  EXPECT_FALSE(reachable("127.0.0.1:4000", "another" + here, here).ok());
}

}  // namespace
}  // namespace baton::net
