// Two hosts with IPv6 alone or both families, and what routers and firewalls say of a network that
// is closed for a while: workers, agents and collectives go on.
#include "absl/strings/str_cat.h"
#include "collectives/communicator.h"
#include "collectives/rendezvous.h"
#include "kvtransfer/agent.h"
#include "tests/std.h"
#include "tests/tcp/faulty_network.h"
#include "tests/two_hosts/two_workers.h"
#include "transport/address.h"
#include "transport/net/endpoint.h"

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
  static std::string link_local(size_t host) { return absl::StrCat("fe80::7:", host + 1); }
  static std::string global(size_t host) { return Hosts::address_v6(host); }
  static WorkerOptions options_of(const std::string& name, const std::string& listen_host) {
    WorkerOptions options;
    options.name = name;
    options.providers = {"tcp"};
    options.key = *ClusterKey::from_bytes("0123456789abcdef");
    options.listen_host = listen_host;
    options.settings = kSettings;
    return options;
  }
  // False where there is no IPv6.
  bool add_v6(std::string (*address)(size_t host) = global) {
    bool added = true;
    change([&](Hosts& it) {
      for (size_t host : {0, 1}) added &= it.add_address_v6(host, 0, address(host));
    });
    return added;
  }
  void remove_v4() {
    change([](Hosts& it) {
      for (size_t host : {0, 1}) it.remove_address(host, 0);
    });
  }
  void set_cut(bool cut) {
    change([&](Hosts& it) { it.wire(0).cut(cut); });
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
#define SKIP_WITHOUT_V6(...) \
  if (!add_v6(__VA_ARGS__)) GTEST_SKIP() << "no address of IPv6 can be added here"

// Promise(network): IPv6 alone, IPv4 alone or either works for workers, agents and ranks | `*`
//   listens on and announces both
TEST_F(Families, OverIPv6AloneASessionIsMadeLostAndFound) {
  SKIP_WITHOUT_V6();
  remove_v4();
  meet(kSettings, "::");
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
  // The wire's own address answers too, and may be the first to do so.
  const bool own = goes_by("[fe80:");
  EXPECT_TRUE(own || goes_by('[' + Hosts::address_v6(1, 0, 77) + "]:")) << explain();
}

TEST_F(Families, TheOtherFamilyTakesOver) {
  SKIP_WITHOUT_V6();
  meet(kSettings, "::");
  EXPECT_TRUE(goes_by(Hosts::address(1) + ':')) << explain();
  expect_done(write(kAll, 'a'), kAll, 'a');
  remove_v4();
  expect_done(write(kAll, 'b'), kAll, 'b');
  EXPECT_TRUE(goes_by('[' + Hosts::address_v6(1) + "]:")) << explain();
}

// A firewall that rejects looks to the caller as a host where nobody listens any more. It is not.
// Promise(network): An ICMP rejection, as of a firewall, ends no session; the first call names it |
//   only a TCP reset is the peer's own refusal
TEST_F(Families, AnIcmpUnreachableEndsNoSession) {
  meet(kSettings);
  for (const int code : {0, 1, 2, 3, 13}) {  // net, host, protocol, port, prohibited
    SCOPED_TRACE(testing::Message() << "code " << code);
    lose_and_go_on(
        [&](bool lost) { change([&](Hosts& it) { it.wire(0).refuse(lost ? code : -1); }); });
    if (HasFailure()) return;
  }
}

TEST_F(Families, ARouteThatGoesAndComesBackEndsNoSession) {
  meet(kSettings);
  for (const size_t host : {0, 1}) {
    lose_and_go_on([&](bool lost) { change([&](Hosts& it) { it.set_route(host, 0, !lost); }); });
    if (HasFailure()) return;
  }
}

// Whose address is wrong is told what the network says.
TEST_F(Families, AFirewallThatRejectsAFirstCallIsNamed) {
  start("0.0.0.0", kSettings);
  change([](Hosts& it) { it.wire(0).faults(0).unreachable = 3; });
  call(workers_[1]->address());
  EXPECT_EQ(workers_[0]->peer_state(peer_), PeerState::kDown);
  EXPECT_THAT(std::string(workers_[0]->peer_status(peer_).message()), HasSubstr("firewall"));
}

// An agent on each host, which serves its metadata, with memory that is registered.
class FamiliesOfAgents : public Families {
 protected:
  void TearDown() override {
    for (size_t host : {0, 1}) {
      if (agents_[host]) hosts_->on(host, [&] { agents_[host].reset(); });
    }
    Families::TearDown();
  }
  kvtransfer::Descriptor whole(size_t host) {
    return {reinterpret_cast<uint64_t>(of_agents_[host].data()), kAll, 0};
  }
  void make_agent(size_t host, const std::string& listen_host, const std::string& advertise = "") {
    hosts_->on(host, [&] {
      kvtransfer::AgentOptions options;
      options.name = host == 0 ? "alpha" : "beta";
      options.worker = options_of(options.name, listen_host);
      options.worker.advertise = advertise;
      options.serve_metadata = true;
      agents_[host] = *kvtransfer::Agent::create(std::move(options));
      EXPECT_TRUE(agents_[host]->register_memory({whole(host)}).ok());
    });
  }
  void fetch(const std::string& where) {
    hosts_->on(0, [&] { EXPECT_TRUE(agents_[0]->fetch_metadata("beta", where).ok()); });
  }
  // Alpha writes all of its memory to beta's when it knows that.
  void expect_moved() {
    hosts_->on(0, [&] {
      until([&] { return agents_[0]->has_remote("beta"); });
      std::fill(of_agents_[1].begin(), of_agents_[1].end(), 'b');
      auto id =
          agents_[0]->make_transfer(Op::kWrite, {whole(0)}, {whole(1)}, "beta", "here").value();
      EXPECT_EQ(agents_[0]->run(id, patience_), absl::OkStatus());
      EXPECT_EQ(of_agents_[1], of_agents_[0]);
    });
  }

  std::array<std::vector<char>, 2> of_agents_ = {std::vector<char>(kAll, 'a'),
                                                 std::vector<char>(kAll, 'b')};
  std::array<std::unique_ptr<kvtransfer::Agent>, 2> agents_;
};

TEST_F(FamiliesOfAgents, MeetOverIPv6Alone) {
  SKIP_WITHOUT_V6();
  remove_v4();
  for (size_t host : {0, 1}) make_agent(host, "::");
  fetch('[' + Hosts::address_v6(1) + "]:" + std::to_string(agents_[1]->port()));
  expect_moved();
  std::vector<kvtransfer::AgentMessage> got;
  hosts_->on(1, [&] {
    until([&] {
      for (auto& each : agents_[1]->messages()) got.push_back(each);
      return !got.empty();
    });
  });
}

// Defaults on hosts with IPv6 alone: who says "every interface" is reached by it.
TEST_F(Families, EveryInterfaceIsOfBothFamilies) {
  SKIP_WITHOUT_V6();
  remove_v4();
  meet(kSettings, "*");
  EXPECT_TRUE(goes_by('[' + Hosts::address_v6(1) + "]:")) << explain();
  expect_done(write(kAll, 'a'), kAll, 'a');
}

// Two hosts that a cable joins have link-local addresses alone, and the interface that a caller
// names is its own: the other host calls its end something else.
TEST_F(Families, ALinkLocalAddressIsReachedByTheCallersInterface) {
  SKIP_WITHOUT_V6(link_local);
  remove_v4();
  start("*", kSettings);
  connect(absl::StrCat("[fe80::7:2%wire0]:", workers_[1]->port()));
  EXPECT_TRUE(goes_by("[fe80::7:2%wire0]:")) << explain();
  expect_done(write(kAll, 'a'), kAll, 'a');
  lose_and_go_on([&](bool lost) { set_cut(lost); });
}

TEST_F(Families, TheScopeOfAListenerIsNotItsCallers) {
  SKIP_WITHOUT_V6(link_local);
  hosts_->on(1, [&] {
    absl::StatusOr<std::unique_ptr<Worker>> worker;
    until([&] {  // an address is there a moment after it was added
      worker = Worker::create(options_of("beta", "fe80::7:2%wire0"));
      return worker.ok();
    });
    const auto told = Address::decode((*worker)->address()).value();
    EXPECT_EQ(told.providers.front().second, absl::StrCat("[fe80::7:2]:", (*worker)->port()));
  });
}

// What a published port, a tunnel or NAT does: whoever is called at `outside` is `inside`, which
// does not know of it, and whose own addresses lead nowhere from here.
class Forwarder {
 public:
  Forwarder(const std::string& outside, const std::string& inside, uint16_t port = 0)
      : network_(outside, port, net::literal(inside)->front()), thread_([this] {
          while (!over_) {
            if (!network_.step()) std::this_thread::sleep_for(std::chrono::microseconds(200));
          }
        }) {}
  ~Forwarder() {
    over_ = true;
    thread_.join();
  }
  uint16_t port() const { return network_.port(); }

 private:
  tcp::FaultyNetwork network_;
  std::atomic<bool> over_{false};
  std::thread thread_;
};

class Published : public FamiliesOfAgents {
 protected:
  void TearDown() override {
    FamiliesOfAgents::TearDown();
    hosts_->on(1, [&] { forwarder_.reset(); });
  }
  // Host 1's worker behind a port of its other address.
  void publish(const std::string& inside, uint16_t port, uint16_t at = 0) {
    hosts_->on(1, [&] {
      forwarder_ =
          std::make_unique<Forwarder>(Hosts::address(1), absl::StrCat(inside, ":", port), at);
    });
    where_ = Hosts::address(1) + ':' + std::to_string(forwarder_->port());
  }
  std::unique_ptr<Forwarder> forwarder_;
  std::string where_;
};

// Promise(network): A worker behind NAT or a published port is met where it was called, and found
//   there again | that address is added behind the worker's own; `advertise` replaces them
TEST_F(Published, WhereAPeerWasCalledIsOneOfItsAddresses) {
  // The peer cannot call back: this side listens at a wire that is down.
  start(Hosts::address(0, 1), kSettings, "127.0.0.1");
  publish("127.0.0.1", workers_[1]->port());
  connect(where_);
  EXPECT_TRUE(goes_by(where_)) << explain();
  expect_done(write(kAll, 'a'), kAll, 'a');
  lose_and_go_on([&](bool lost) { set_cut(lost); });
  EXPECT_TRUE(goes_by(where_)) << explain();
}

// Behind NAT the peer's own address is somebody else's here, or silent.
TEST_F(Published, AnInsideAddressThatIsSilentIsPassedOver) {
  change([](Hosts& it) {
    for (size_t host : {0, 1}) it.set_link(host, 1, true);
    it.wire(1).cut(true);
  });
  start("*", kSettings, Hosts::address(1, 1));
  publish(Hosts::address(1, 1), workers_[1]->port());
  connect(where_);
  EXPECT_TRUE(goes_by(where_)) << explain();
}

// What leads there without a detour is taken.
TEST_F(Published, AnInsideAddressThatAnswersIsTaken) {
  start("*", kSettings);
  publish("127.0.0.1", workers_[1]->port());
  connect(where_);
  EXPECT_TRUE(goes_by(absl::StrCat(Hosts::address(1), ":", workers_[1]->port()))) << explain();
}

TEST_F(Published, AnAgentThatWasAskedForItsMetadataIsReachedWhereItAnswered) {
  for (size_t host : {0, 1}) make_agent(host, "");
  publish("127.0.0.1", agents_[1]->port());
  fetch(where_);
  expect_moved();
  // Without a call it must be told, by itself: whoever has its metadata by other means.
  const uint16_t port = forwarder_->port();
  hosts_->on(1, [&] {
    agents_[1].reset();
    forwarder_.reset();
  });
  make_agent(1, "", absl::StrCat(Hosts::address(1), ":", port));
  publish("127.0.0.1", agents_[1]->port(), port);
  hosts_->on(0, [&] {
    const auto metadata = agents_[1]->metadata().value();
    EXPECT_TRUE(agents_[0]->add_remote(metadata).ok());
  });
  expect_moved();
}

class Ranks : public Families {
 protected:
  // Two ranks meet at `rendezvous`, which the first serves, and sum while the network between them
  // is cut, and afterwards. `address`: what the second is reached at.
  void expect_sums(const std::string& rendezvous, const std::string& address) {
    std::unique_ptr<collectives::RendezvousServer> server;
    hosts_->on(
        0, [&] { server = collectives::RendezvousServer::start_at(key_, rendezvous, 2).value(); });
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
    auto comm = Communicator::create(own).value();
    if (number == 0) {
      EXPECT_THAT(comm->routes(), HasSubstr(address));
    }
    for (int call = 0; call < kCalls; ++call) {
      std::vector<float> data(10'000, static_cast<float>(number + call));
      ASSERT_EQ(
          comm->all_reduce(data.data(), data.data(), data.size(), DataType::kF32, ReduceOp::kSum),
          absl::OkStatus());
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
