// Two hosts whose only network loses packets that are as long as their interfaces allow, and tells
// nobody: tunnels with a smaller MTU, where ICMP is filtered. Handshakes come through there.
#include <sys/wait.h>
#include <unistd.h>

#include "tests/two_hosts/two_workers.h"
#include "tests/usable_provider.h"
#include "transport/base/child.h"

namespace baton {
namespace {

using testing::HasSubstr;
using testing::Not;

const SettingValues kSettings = {{"tcp.sockets", "2"},
                                 {"tcp.stall_ms", "3000"},
                                 {"tcp.handshake_ms", "2000"},
                                 {"peer.redial_ms", "600000"}};
constexpr char kLost[] = "large packets get lost";

class NarrowPath : public TwoWorkers {
 protected:
  size_t wires() const override { return 1; }
  // Of the packets that `hosts` send, longer ones vanish.
  void carry(size_t bytes, const std::vector<size_t>& hosts) {
    change([&](Hosts& it) {
      for (size_t host : hosts) it.wire(0).faults(host).largest = bytes;
    });
  }
  // Both ways, with bytes that fill many packets.
  void expect_all_moves(char letter) {
    expect_done(write(kAll, letter), kAll, letter);
    if (HasFatalFailure()) return;
    std::fill(memory_[1].begin(), memory_[1].end(), static_cast<char>(letter + 1));
    expect_done(read(kAll), kAll, static_cast<char>(letter + 1));
    EXPECT_EQ(memory_[0], memory_[1]);
  }
};

struct Narrow {
  const char* name;
  size_t largest;
  std::vector<size_t> hosts;
  const char* segments;  // what a packet of that carries, less TCP's time stamps
};
class NarrowPaths : public NarrowPath, public testing::WithParamInterface<Narrow> {};

// Promise(network): A path that loses large packets silently still works, in smaller segments, and
//   `explain()` says so | full packets are probed in both directions; 1220 then 536 bytes otherwise
TEST_P(NarrowPaths, CarryAllInSmallerPacketsAndAgainInFullOnesWhenTheyDo) {
  carry(GetParam().largest, GetParam().hosts);
  meet(kSettings);
  expect_all_moves('a');
  if (HasFatalFailure()) return;
  EXPECT_THAT(explain(), testing::AllOf(HasSubstr(kLost), HasSubstr(GetParam().segments)));
  EXPECT_THAT(workers_[1]->explain(their_peer_), HasSubstr(GetParam().segments));
  EXPECT_EQ(workers_[0]->stats().peers_lost, 0u);
  carry(SIZE_MAX, {0, 1});
  until([&] { return goes_by(" sockets") && !goes_by(kLost); });
  expect_all_moves('c');
  EXPECT_EQ(workers_[0]->stats().peers_lost, 0u) << "it was never without a rail";
}

TEST_P(NarrowPaths, ThatWereWideLoseNothing) {
  meet(kSettings);
  expect_all_moves('a');
  if (HasFatalFailure()) return;
  EXPECT_THAT(explain(), Not(HasSubstr(kLost)));
  carry(GetParam().largest, GetParam().hosts);
  expect_all_moves('c');
}

INSTANTIATE_TEST_SUITE_P(Each, NarrowPaths,
                         testing::Values(Narrow{"Tunnel", 1300, {0, 1}, "segments of 1208 bytes"},
                                         Narrow{"Least", 600, {0, 1}, "segments of 524 bytes"},
                                         Narrow{"There", 1300, {0}, "segments of 1208 bytes"},
                                         Narrow{"Back", 1300, {1}, "segments of 1208 bytes"}),
                         [](const auto& each) { return each.param.name; });

// A worker that is asked for its address answers with more than one small packet.
TEST_P(NarrowPaths, LeadToAWorkerOfWhichOnlyThePortIsKnown) {
  carry(GetParam().largest, GetParam().hosts);
  start("0.0.0.0", kSettings);
  connect(absl::StrCat(Hosts::address(1), ":", workers_[1]->port()));
}

// Nobody waits for ever where nothing of any use comes through; the reason says what to look at.
TEST_F(NarrowPath, OneThatCarriesNextToNothingIsNamed) {
  carry(300, {0, 1});
  start("0.0.0.0", kSettings);
  call(workers_[1]->address());
  EXPECT_EQ(workers_[0]->peer_state(peer_), PeerState::kDown);
  EXPECT_THAT(explain(), HasSubstr("the MTU of the path"));
}

// UCX makes its connections itself, and has no such remedy: a peer that has nothing else is not
// reached, and the reason is told. A process for each side, because UCX reads what devices there
// are from the process's /sys.
using Ends = std::array<int, 2>;

std::unique_ptr<Worker> over_ucx() {
  auto worker = Worker::create({.name = "ucx alone",
                                .providers = {"ucx"},
                                .key = *ClusterKey::from_bytes("0123456789abcdef"),
                                .listen_host = "0.0.0.0",
                                .settings = {{"ucx.handshake_ms", "2000"}}});
  return worker.ok() ? *std::move(worker) : nullptr;
}

// Exit statuses: what went wrong.
int serve(const Ends& addresses, const Ends& over) {
  close(over[1]);  // the end of the caller is to be seen
  const auto worker = over_ucx();
  if (worker == nullptr) return 11;
  ProgressThread thread(*worker);
  const std::string address = worker->address();
  if (write(addresses[1], address.data(), address.size()) < 0) return 12;
  char byte;
  return read(over[0], &byte, 1) == 1 ? 0 : 13;
}

int call(const Ends& addresses, const Ends& over) {
  const auto worker = over_ucx();
  if (worker == nullptr) return 21;
  std::string address(4096, 0);
  const ssize_t size = read(addresses[0], address.data(), address.size());
  if (size <= 0) return 22;
  address.resize(static_cast<size_t>(size));
  const auto peer = worker->connect(address);
  if (!peer.ok()) return 23;
  const auto settled = [&] { return worker->peer_state(*peer) != PeerState::kConnecting; };
  if (!worker->wait_until(settled, patient(std::chrono::seconds(60))).ok()) return 24;
  const std::string why = worker->explain(*peer);
  if (why.find("the MTU of the path") == std::string::npos) {
    std::fputs(why.c_str(), stderr);
    return 25;
  }
  return write(over[1], "", 1) == 1 ? 0 : 26;
}

TEST(NarrowPathOfUcx, IsNamed) {
  if (const std::string why = why_unusable("ucx"); !why.empty()) GTEST_SKIP() << why;
  auto made = Hosts::create(1, 0);
  if (absl::IsUnavailable(made.status())) GTEST_SKIP() << made.status().message();
  ASSERT_TRUE(made.ok()) << made.status();
  Hosts& hosts = **made;
  for (size_t host : {0, 1}) hosts.wire(0).faults(host).largest = 1300;
  Ends addresses, over;
  ASSERT_TRUE(pipe(addresses.data()) == 0 && pipe(over.data()) == 0);
  size_t running = 0;
  for (size_t host : {0, 1}) {
    ++running;
    if (base::fork_child() != 0) continue;
    hosts.become(host);
    _exit(host == 0 ? call(addresses, over) : serve(addresses, over));
  }
  for (int end : {addresses[0], addresses[1], over[0], over[1]}) close(end);
  while (running > 0) {
    hosts.move(std::chrono::milliseconds(1));
    int status = 0;
    if (waitpid(-1, &status, WNOHANG) <= 0) continue;
    --running;
    EXPECT_EQ(WEXITSTATUS(status), 0);
    EXPECT_TRUE(WIFEXITED(status));
  }
}

}  // namespace
}  // namespace baton
