// Seeded fault schedules between two hosts: network namespaces, joined by a wire that loses,
// delays, reorders, repeats and changes packets, is slow, is cut, in one direction or both, forgets
// its connections, is said to be unreachable, and carries less than it says; devices go down, get
// another address or another MTU, routes go. Beside it all that real_faults_test does. Nothing is
// lost, repeated, late or hung.
//
// tests/seeds.h says which ones run.
#include <iostream>

#include "tests/hostile/real_check.h"
#include "tests/sanitized.h"
#include "tests/test.h"
#include "tests/two_hosts/hosts.h"

namespace baton {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr int kEvents = 4;  // of a schedule that its sessions survive

class TwoHostsRun : public RealRun {
 public:
  TwoHostsRun(Hosts& hosts, const std::string& provider, uint64_t seed)
      : RealRun(provider, seed, {.own = true, .survives = seed % 4 != 3}), hosts_(hosts) {
    shared_.allowed = 0;
  }

 private:
  void become(size_t side) override { hosts_.become(side); }
  void pause() override { hold(microseconds(200)); }

  bool disturb() override {
    const bool short_ones = schedule_.network.survives;
    for (int event = 0; event < (short_ones ? kEvents : 1); ++event) disturb(event);
    if (!short_ones && !lose_for_good()) return false;
    shared_.allowed = kRealTransfers;
    if (short_ones && pick(6) == 0) {
      hold(microseconds(pick(100'000)));
      shared_.killed = 1;
      lose(pick(2));
      note("killed:", dead_);
    }
    return until([&] { return over(0) && over(1); });
  }

  void hold(Time span) { hosts_.move(span); }
  template <typename... Parts>
  void note(const Parts&... parts) {
    ((what_ += ' '), ..., (what_ += absl::StrCat(parts)));
  }

  // One event, with its share of the transfers under way, and its end.
  void disturb(int event) {
    const size_t number = pick(hosts_.wires());
    Wire& wire = hosts_.wire(number);
    const size_t side = pick(2);
    const Time span = milliseconds(20 + pick(pick(3) == 0 ? 1500 : 300));
    WireFaults& faults = wire.faults(side);
    const bool both = pick(2) == 0;
    const size_t kind = pick(14);
    note("event", kind, "wire", number, "side", side, both ? "both" : "one",
         span.count() / 1'000'000, "ms;");
    const auto allow = [&] {
      shared_.allowed = (static_cast<size_t>(event) + 1) * kRealTransfers / (kEvents + 1);
    };
    if (pick(2) == 0) allow();  // before it, so that it finds them on their way, or within it
    switch (kind) {
      case 0:
        faults.loss = 0.05;
        break;
      case 1:
        faults.delay = milliseconds(1 + pick(20));
        faults.jitter = milliseconds(pick(10));
        break;
      case 2:
        faults.duplicate = 0.2;
        faults.flip = 0.02;
        break;
      case 3:
        faults.bytes_per_s = 200'000 + 1000 * pick(5000);
        break;
      case 4:
      case 5:
        faults.cut = true;
        break;
      case 6:
        hosts_.set_link(side, number, false);
        break;
      case 7:
        // A reset as its connection comes up ends a process with UCX 1.13, by an assertion.
        wire.forget_connections(both && !ucx());
        break;
      case 8:
        hosts_.set_mtu(0, number, mtu());
        hosts_.set_mtu(1, number, mtu());
        break;
      case 9:
        faults.largest = 600;
        break;
      case 10:
        hosts_.set_address(side, number, Hosts::address(side, number, 10 + pick(200)));
        break;
      case 11:
        faults.unreachable = std::array{0, 1, 3, 13}[pick(4)];
        break;
      case 12:
        hosts_.set_route(side, number, false);
        break;
      default:
        kill(pids_[side], SIGSTOP);
    }
    if (both) wire.faults(1 - side) = faults;
    allow();
    hold(span);
    wire.heal();
    if (kind == 6) hosts_.set_link(side, number, true);
    // Half of the hosts that get another address keep it; UCX looks for its own at the start only.
    if (kind == 10 && (both || ucx()))
      hosts_.set_address(side, number, Hosts::address(side, number));
    if (kind == 12) hosts_.set_route(side, number, true);
    if (kind > 12) kill(pids_[side], SIGCONT);
  }
  bool ucx() const { return schedule_.provider == "ucx"; }
  int mtu() { return std::array{576, 1500, 9000}[pick(3)]; }

  // The network, or one side, is away until both have given the other up, and then it is back.
  bool lose_for_good() {
    const size_t side = pick(2), kind = pick(4);
    note("for good", kind, "side", side);
    shared_.allowed = kRealTransfers - 2;
    hold(milliseconds(pick(20)));
    for (size_t i = 0; i < hosts_.wires(); ++i) {
      Wire& wire = hosts_.wire(i);
      if (kind == 0) wire.faults(0).cut = wire.faults(1).cut = true;
      if (kind == 1) wire.faults(side).cut = true;
      if (kind == 2) hosts_.set_link(side, i, false);
    }
    if (kind == 3) kill(pids_[side], SIGSTOP);
    shared_.allowed = kRealTransfers;
    const bool noticed = until([&] {
      return (shared_.sides[0].down != 0 || (kind == 3 && side == 0)) &&
             (shared_.sides[1].down != 0 || (kind == 3 && side == 1));
    });
    for (size_t i = 0; i < hosts_.wires(); ++i) {
      hosts_.wire(i).heal();
      if (kind == 2) hosts_.set_link(side, i, true);
    }
    if (kind == 3) kill(pids_[side], SIGCONT);
    return noticed;
  }

  Hosts& hosts_;
};

class NetworkFaults : public testing::TestWithParam<std::string> {};

// Promise(network): Loss, delay, reordering, cuts and changed addresses shorter than
//   `peer.redial_ms` fail no transfer | sessions outlive their rails
TEST_P(NetworkFaults, EveryTransferEndsExactlyOnce) {
  if (!usable_in_a_fork(GetParam())) GTEST_SKIP() << GetParam() << " cannot be used here";
  const Seeds seeds(kSanitized ? 4 : 5);
  RealSeen seen;
  for (uint64_t seed = seeds.begin; seed < seeds.end; ++seed) {
    SCOPED_TRACE(testing::Message() << "BATON_SEED=" << seed);
    const auto hosts = Hosts::create(1 + seed / 4 % 2, seed);
    if (absl::IsUnavailable(hosts.status())) GTEST_SKIP() << hosts.status().message();
    ASSERT_TRUE(hosts.ok()) << hosts.status();
    TwoHostsRun(**hosts, GetParam(), seed).run(seen);
    if (HasFailure()) return;
  }
  if (seeds.one) return;
  std::cout << seen.done << " done, " << seen.resumed << " peers called again, " << seen.killed
            << " processes killed\n";
  EXPECT_GT(seen.done, 0u);
}

INSTANTIATE_TEST_SUITE_P(Providers, NetworkFaults, testing::Values("tcp", "ucx"),
                         [](const auto& each) { return each.param; });

}  // namespace
}  // namespace baton
