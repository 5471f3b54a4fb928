// Two hosts with IPv6 alone or both families, and what routers and firewalls say of a network that
// is closed for a while: workers, agents and collectives go on.
#include <atomic>
#include <thread>

#include "collectives/communicator.h"
#include "collectives/rendezvous.h"
#include "kvtransfer/agent.h"
#include "tests/two_hosts/two_workers.h"

namespace baton {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

const SettingValues kSettings = {{"tcp.sockets", "2"},
                                 {"tcp.stall_ms", "500"},
                                 {"tcp.handshake_ms", "1500"},
                                 {"peer.redial_ms", "600000"}};

class Families : public TwoWorkers {
 protected:
  void SetUp() override {
    TwoWorkers::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    change([](Hosts& it) {
      for (size_t host : {0, 1}) it.set_link(host, 1, false);  // one wire will do
    });
  }
  // False, with the test skipped, where there is no IPv6.
  bool add_v6() {
    bool added = true;
    change([&](Hosts& it) {
      for (size_t host : {0, 1}) added &= it.add_address_v6(host, 0, Hosts::address_v6(host));
    });
    return added;
  }
  void remove_v4() {
    change([](Hosts& it) {
      for (size_t host : {0, 1}) it.remove_address(host, 0);
    });
  }
  void set_cut(bool cut) {
    change([&](Hosts& it) { it.wire(0).faults(0).cut = it.wire(0).faults(1).cut = cut; });
  }
  // Something is under way while the network is away, for long enough to lose the peer.
  void lose_and_go_on(const std::function<void(bool lost)>& set) {
    const uint64_t lost_before = workers_[0]->stats().peers_lost;
    set(true);
    const TransferId id = write(kAll, 'l');
    // Who has nothing under way notices later.
    EXPECT_TRUE(workers_[1]->notify_detached(their_peer_, "are you there?").ok());
    until([&] { return workers_[0]->stats().peers_lost > lost_before; });
    // For calls that are answered with a no.
    std::this_thread::sleep_for(milliseconds(500));
    set(false);
    expect_done(id, kAll, 'l');
  }
};
#define SKIP_WITHOUT_V6() \
  if (!add_v6()) GTEST_SKIP() << "no address of IPv6 can be added here"

TEST_F(Families, OverIPv6AloneASessionIsMadeLostAndFound) {
  SKIP_WITHOUT_V6();
  remove_v4();
  start("::", kSettings);
  if (HasFatalFailure()) return;
  connect();
  EXPECT_TRUE(goes_by('[' + Hosts::address_v6(1) + "]:")) << explain();
  expect_done(write(kAll, 'a'), kAll, 'a');
  lose_and_go_on([&](bool lost) { set_cut(lost); });
  lose_and_go_on([&](bool lost) {
    // As a host does that gets another one.
    change([&](Hosts& it) {
      if (lost) it.remove_address_v6(1, 0, Hosts::address_v6(1));
      if (!lost) it.add_address_v6(1, 0, Hosts::address_v6(1, 0, 77));
    });
  });
  EXPECT_TRUE(goes_by('[' + Hosts::address_v6(1, 0, 77) + "]:")) << explain();
}

TEST_F(Families, OfBothTheOtherTakesOver) {
  SKIP_WITHOUT_V6();
  start("::", kSettings);
  if (HasFatalFailure()) return;
  connect();
  EXPECT_TRUE(goes_by(Hosts::address(1) + ':')) << explain();
  expect_done(write(kAll, 'a'), kAll, 'a');
  remove_v4();
  expect_done(write(kAll, 'b'), kAll, 'b');
  EXPECT_TRUE(goes_by('[' + Hosts::address_v6(1) + "]:")) << explain();
}

// A firewall that rejects looks to the caller as a host where nobody listens any more. It is not.
TEST_F(Families, WhoeverSaysByICMPThatThereIsNoWayEndsNoSession) {
  start("0.0.0.0", kSettings);
  if (HasFatalFailure()) return;
  connect();
  for (const int code : {0, 1, 2, 3, 13}) {  // net, host, protocol, port, prohibited
    SCOPED_TRACE(testing::Message() << "code " << code);
    lose_and_go_on([&](bool lost) {
      change([&](Hosts& it) {
        for (size_t host : {0, 1}) it.wire(0).faults(host).unreachable = lost ? code : -1;
      });
    });
    if (HasFailure()) return;
  }
}

TEST_F(Families, ARouteThatGoesAndComesBackEndsNoSession) {
  start("0.0.0.0", kSettings);
  if (HasFatalFailure()) return;
  connect();
  for (const size_t host : {0, 1}) {
    lose_and_go_on([&](bool lost) { change([&](Hosts& it) { it.set_route(host, 0, !lost); }); });
    if (HasFailure()) return;
  }
}

// Whose address is wrong is told what the network says.
TEST_F(Families, AFirewallThatRejectsAFirstCallIsNamed) {
  start("0.0.0.0", kSettings);
  if (HasFatalFailure()) return;
  change([](Hosts& it) { it.wire(0).faults(0).unreachable = 3; });
  hosts_->on(0, [&] {
    auto peer = workers_[0]->connect(workers_[1]->address());
    ASSERT_TRUE(peer.ok()) << peer.status();
    until([&] { return workers_[0]->peer_state(*peer) == PeerState::kDown; });
    EXPECT_THAT(std::string(workers_[0]->peer_status(*peer).message()), HasSubstr("firewall"));
  });
}

TEST_F(Families, AgentsMeetOverIPv6Alone) {
  SKIP_WITHOUT_V6();
  remove_v4();
  using kvtransfer::Agent;
  std::array<std::vector<char>, 2> memory = {std::vector<char>(kAll, 'a'),
                                             std::vector<char>(kAll, 'b')};
  std::array<std::unique_ptr<Agent>, 2> agents;
  const auto whole = [&](size_t host) {
    return kvtransfer::Descriptor{reinterpret_cast<uint64_t>(memory[host].data()), kAll, 0};
  };
  for (size_t host : {0, 1}) {
    hosts_->on(host, [&] {
      auto agent = Agent::create({.name = host == 0 ? "alpha" : "beta",
                                  .worker = {.providers = {"tcp"},
                                             .key = *ClusterKey::from_bytes("0123456789abcdef"),
                                             .listen_host = "::",
                                             .settings = kSettings},
                                  .serve_metadata = true});
      ASSERT_TRUE(agent.ok()) << agent.status();
      agents[host] = *std::move(agent);
      EXPECT_TRUE(agents[host]->register_memory({whole(host)}).ok());
    });
  }
  ASSERT_FALSE(HasFatalFailure());
  hosts_->on(0, [&] {
    const std::string there = '[' + Hosts::address_v6(1) + "]:" + std::to_string(agents[1]->port());
    EXPECT_TRUE(agents[0]->fetch_metadata("beta", there).ok());
    until([&] { return agents[0]->has_remote("beta"); });
    auto id = agents[0]->make_transfer(Op::kWrite, {whole(0)}, {whole(1)}, "beta", "here");
    ASSERT_TRUE(id.ok()) << id.status();
    EXPECT_TRUE(agents[0]->post(*id).ok());
    const absl::Status status = agents[0]->wait(*id, patience_);
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_TRUE(agents[0]->release(*id, patience_).ok());
  });
  EXPECT_EQ(memory[1], memory[0]);
  std::vector<kvtransfer::AgentMessage> got;
  hosts_->on(1, [&] {
    until([&] {
      for (auto& each : agents[1]->messages()) got.push_back(each);
      return !got.empty();
    });
  });
  for (size_t host : {0, 1}) hosts_->on(host, [&] { agents[host].reset(); });
}

class Ranks : public Families {
 protected:
  // Two ranks meet at `rendezvous`, which the first serves, and sum while the network between them
  // is cut, and afterwards. `address`: what the second is reached at.
  void expect_sums(const std::string& rendezvous, const std::string& address) {
    std::unique_ptr<collectives::RendezvousServer> server;
    hosts_->on(0, [&] {
      auto made = collectives::RendezvousServer::start_at(key_, rendezvous, 2);
      ASSERT_TRUE(made.ok()) << made.status();
      server = *std::move(made);
    });
    if (server == nullptr) return;
    std::thread other([&] { hosts_->on(1, [&] { rank(1, rendezvous, address); }); });
    std::thread first([&] { hosts_->on(0, [&] { rank(0, rendezvous, address); }); });
    until([&] { return summed_ > kCalls / 2 || HasFailure(); });
    set_cut(true);
    std::this_thread::sleep_for(
        milliseconds(700));  // some sockets are lost, or none: both are well
    set_cut(false);
    other.join();
    first.join();
    EXPECT_EQ(summed_, 2 * kCalls);
  }

 private:
  static constexpr int kCalls = 200;

  void rank(int number, const std::string& rendezvous, const std::string& address) {
    CommunicatorOptions own;
    own.rank = number;
    own.ranks = 2;
    own.rendezvous = rendezvous;
    own.worker.providers = {"tcp"};
    own.worker.key = key_;
    own.worker.settings = kSettings;
    own.calibrate = false;
    own.slot_bytes = 64 << 10;
    own.start_timeout = own.timeout = patience_;
    auto comm = Communicator::create(own);
    ASSERT_TRUE(comm.ok()) << comm.status();
    if (number == 0) {
      EXPECT_THAT((*comm)->routes(), HasSubstr(address));
    }
    for (int call = 0; call < kCalls; ++call) {
      std::vector<float> data(10'000, static_cast<float>(number + call));
      const absl::Status status = (*comm)->all_reduce(data.data(), data.data(), data.size(),
                                                      DataType::kF32, ReduceOp::kSum);
      ASSERT_TRUE(status.ok()) << status;
      ASSERT_EQ(data.back(), static_cast<float>(2 * call + 1));
      ++summed_;
    }
  }

  const ClusterKey key_ = *ClusterKey::from_bytes("a key for tests of 24 B.");
  std::atomic<int> summed_{0};
};

TEST_F(Ranks, SumOverIPv6AloneWhereTheNetworkIsCutForAMoment) {
  SKIP_WITHOUT_V6();
  remove_v4();
  expect_sums('[' + Hosts::address_v6(0) + "]:4711", '[' + Hosts::address_v6(1) + "]:");
}

TEST_F(Ranks, SumWhereBothFamiliesAre) {
  SKIP_WITHOUT_V6();
  expect_sums('[' + Hosts::address_v6(0) + "]:4711", Hosts::address(1) + ':');
}

}  // namespace
}  // namespace baton
