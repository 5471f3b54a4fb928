// Two hosts with two NICs each: sockets are spread over both; when one is lost, in whatever way,
// what is open goes on by the other, and when it is back it is used again.
#include <algorithm>

#include "tests/two_hosts/two_workers.h"

namespace baton {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

// Longer than the one thread that moves all packets is held up on a busy machine; each loss of
// which nobody is told costs as much, so it is not longer by BATON_PATIENCE.
const SettingValues kSettings = {{"tcp.sockets", "4"},
                                 {"tcp.stall_ms", "3000"},
                                 {"tcp.handshake_ms", "2000"},
                                 {"peer.redial_ms", "600000"}};

// Ways to lose a NIC of which the processes are told nothing.
struct Loss {
  const char* name;
  std::function<void(Hosts&, size_t wire, bool lost)> set;
};
const Loss kLosses[] = {
    {"the wire is silent", [](Hosts& it, size_t wire, bool lost) { it.wire(wire).cut(lost); }},
    {"the caller's link is down",
     [](Hosts& it, size_t wire, bool lost) { it.set_link(0, wire, !lost); }},
    {"the other's link is down",
     [](Hosts& it, size_t wire, bool lost) { it.set_link(1, wire, !lost); }},
    {"the caller's route is gone",
     [](Hosts& it, size_t wire, bool lost) { it.set_route(0, wire, !lost); }},
    {"the other's route is gone",
     [](Hosts& it, size_t wire, bool lost) { it.set_route(1, wire, !lost); }},
    {"a router says unreachable",
     [](Hosts& it, size_t wire, bool lost) { it.wire(wire).refuse(lost ? 1 : -1); }},
    {"a firewall rejects",
     [](Hosts& it, size_t wire, bool lost) { it.wire(wire).refuse(lost ? 3 : -1); }},
};

class TwoNics : public TwoWorkers {
 protected:
  void both(size_t wire, const std::function<void(WireFaults&)>& what) {
    change([&](Hosts& it) { it.wire(wire).both(what); });
  }
  bool goes_by_wire(size_t wire) const { return goes_by(Hosts::address(1, wire) + ':'); }
};

TEST_F(TwoNics, AnAddressNamesBothAndSocketsAreSpread) {
  meet(kSettings);
  until([&] { return goes_by_wire(0) && goes_by_wire(1); });
  EXPECT_THAT(explain(), HasSubstr("some of 4 sockets"));
  const std::array<uint64_t, 2> before = {moved_by(0), moved_by(1)};
  for (int i = 0; i < 4; ++i) expect_done(write(kAll, 'x'), kAll, 'x');
  // Which socket takes a slice is a matter of load; that both wires take some is not.
  for (size_t wire : {0, 1}) EXPECT_GT(moved_by(wire) - before[wire], 4 * kPage) << wire;
}

class TwoNicsLose : public TwoNics, public testing::WithParamInterface<Loss> {};

TEST_P(TwoNicsLose, WhatIsOpenGoesOnByTheOtherAndTheLostOneIsUsedAgain) {
  meet(kSettings);
  for (size_t lost : {1, 0}) {
    SCOPED_TRACE(testing::Message() << "without NIC " << lost);
    until([&] { return goes_by_wire(0) && goes_by_wire(1); });
    const char letter = static_cast<char>('A' + lost);
    // Under way: it may not be through before the loss.
    both(lost, [](WireFaults& faults) { faults.delay = milliseconds(20); });
    const TransferId under_way = write(kAll, letter);
    change([&](Hosts& it) {
      it.wire(lost).heal();
      GetParam().set(it, lost, true);
    });
    expect_done(under_way, kAll, letter);
    if (HasFatalFailure()) return;
    for (size_t bytes : {size_t{8}, kPage, kAll}) {
      expect_done(write(bytes, 'm'), bytes, 'm');
      if (HasFatalFailure()) return;
    }
    change([&](Hosts& it) { GetParam().set(it, lost, false); });
    until([&] { return goes_by_wire(0) && goes_by_wire(1); });
    const uint64_t before = moved_by(lost);
    for (int i = 0; i < 8; ++i) expect_done(write(kAll, 'y'), kAll, 'y');
    EXPECT_GT(moved_by(lost) - before, 4 * kPage);
  }
  EXPECT_EQ(workers_[0]->stats().peers_lost, 0u) << "it moved over, and was never without a rail";
}

INSTANTIATE_TEST_SUITE_P(Each, TwoNicsLose, testing::ValuesIn(kLosses), [](const auto& each) {
  std::string name = each.param.name;
  std::erase_if(name,
                [](char letter) { return !std::isalnum(static_cast<unsigned char>(letter)); });
  return name;
});

// The smallest of transfers go by the first socket, on a busy machine by either NIC. One that finds
// it dead must not wait for each socket beside it in turn: those are known to be as dead.
// Promise(network): With several NICs, tcp spreads its sockets over them; losing one costs at most
//   1.25 `tcp.stall_ms`, and it is used again within a minute | sockets are bound by the kernel's
//   view of paths and moved when their NIC answers
TEST_F(TwoNics, ADeadWayIsLeftByAllOfItsSocketsAtOnce) {
  meet(kSettings);
  until([&] { return goes_by_wire(0) && goes_by_wire(1); });
  expect_done(write(8, 'a'), 8, 'a');
  const auto cut = [&](size_t wire, bool lost) {
    change([&](Hosts& it) { it.wire(wire).cut(lost); });
  };
  size_t dead = 0;
  for (; dead < 2; ++dead) {
    cut(dead, true);
    expect_done(write(8, 'b'), 8, 'b');
    if (HasFatalFailure()) return;
    if (!goes_by_wire(dead)) break;
    cut(dead, false);
  }
  ASSERT_LT(dead, 2u) << explain();
  EXPECT_TRUE(goes_by_wire(1 - dead)) << explain();
  EXPECT_EQ(workers_[0]->stats().peers_lost, 0u);
}

// Whoever calls there is answered, and nothing of any size comes through.
TEST_F(TwoNics, ANicThatCarriesOnlySmallPacketsIsLeftAndUsedAgainWhenItCarriesAll) {
  meet(kSettings);
  until([&] { return goes_by_wire(0) && goes_by_wire(1); });
  const auto carry = [&](size_t bytes) {
    both(1, [&](WireFaults& faults) { faults.largest = bytes; });
  };
  carry(600);
  char letter = 'a';
  while (goes_by_wire(1)) {
    expect_done(write(kAll, letter), kAll, letter);
    if (HasFatalFailure()) return;
    if (++letter > 'z') letter = 'a';
  }
  for (int i = 0; i < 8; ++i) {
    expect_done(write(kAll, 'z'), kAll, 'z');
    if (HasFatalFailure()) return;
  }
  carry(SIZE_MAX);
  until([&] { return goes_by_wire(0) && goes_by_wire(1); });
  const uint64_t before = moved_by(1);
  for (int i = 0; i < 8; ++i) expect_done(write(kAll, 'y'), kAll, 'y');
  EXPECT_GT(moved_by(1) - before, 4 * kPage);
  EXPECT_EQ(workers_[0]->stats().peers_lost, 0u);
}

// What a NIC says of its speed is not what the network behind it carries. On a busy machine the
// fast one carries little, and less from one moment to the next: the slow one has a 20th of what
// both carried just before, and of a few tries one is enough.
TEST_F(TwoNics, ASlowOneBesideAFastOneHasLittleOfEachTransfer) {
  meet(kSettings);
  until([&] { return goes_by_wire(0) && goes_by_wire(1); });
  const auto limit_first = [&](double bytes_per_s) {
    both(0, [&](WireFaults& faults) { faults.bytes_per_s = static_cast<uint64_t>(bytes_per_s); });
  };
  constexpr int kWrites = 8;
  uint64_t by_slow = SIZE_MAX;
  for (int tries = 0; tries < 4 && by_slow >= kWrites * kAll / 4; ++tries) {
    limit_first(0);
    const Time begin = Clock::steady().now();
    expect_done(write(kAll, 'u'), kAll, 'u');
    const double both = kAll / seconds_of(Clock::steady().now() - begin);
    if (both < 2e6) GTEST_SKIP() << "too busy a machine: " << both << " bytes/s by both";
    limit_first(std::min(both / 20, 1e6));
    expect_done(write(kAll, 'a'), kAll, 'a');  // it shows how quick each is
    const uint64_t before = moved_by(0);
    for (int i = 0; i < kWrites; ++i) expect_done(write(kAll, 'b'), kAll, 'b');
    if (HasFailure()) return;
    by_slow = moved_by(0) - before;
  }
  EXPECT_LT(by_slow, kWrites * kAll / 4) << "half of it before";
}

// A session may lose both, and be met again by one of them while the other is away.
TEST_F(TwoNics, AfterAllWasLostTheNicThatComesBackLaterIsUsedToo) {
  meet(kSettings);
  for (const bool by_link : {false, true}) {
    SCOPED_TRACE(by_link);
    until([&] { return goes_by_wire(0) && goes_by_wire(1); });
    const auto lose = [&](size_t wire, bool lost) {
      change([&](Hosts& it) {
        if (by_link) return it.set_link(0, wire, !lost);
        it.wire(wire).cut(lost);
      });
    };
    const uint64_t lost_before = workers_[0]->stats().peers_lost;
    for (size_t wire : {0, 1}) lose(wire, true);
    const TransferId id = write(kAll, 'z');
    until([&] { return workers_[0]->stats().peers_lost > lost_before; });
    lose(1, false);
    expect_done(id, kAll, 'z');
    EXPECT_FALSE(goes_by_wire(0)) << explain();
    lose(0, false);
  }
  until([&] { return goes_by_wire(0) && goes_by_wire(1); });
}

}  // namespace
}  // namespace baton
