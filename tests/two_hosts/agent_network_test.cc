// Two agents on two hosts, and what may happen to the network between them: metadata is fetched,
// lists are moved, messages arrive once, transfers are released in a partition, hosts move.
#include <iostream>

#include "kvtransfer/agent.h"
#include "tests/fails_with.h"
#include "tests/sanitized.h"
#include "tests/test.h"
#include "tests/two_hosts/hosts.h"
#include "tests/until.h"

namespace baton::kvtransfer {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr size_t kPage = 32 << 10;
constexpr size_t kPages = 32;
const Time kLong = until_gives_up();

class AgentNetwork : public testing::Test {
 protected:
  void SetUp() override {
    auto hosts = Hosts::create(2, number_of("BATON_SEED", 0));  // most tests use one wire
    if (absl::IsUnavailable(hosts.status())) GTEST_SKIP() << hosts.status().message();
    ASSERT_TRUE(hosts.ok()) << hosts.status();
    for (size_t host : {0, 1}) (*hosts)->set_link(host, 1, false);
    hosts_.emplace(*std::move(hosts));
  }
  void TearDown() override {
    for (size_t host : {0, 1}) {
      if (agents_[host]) hosts_->on(host, [&] { agents_[host].reset(); });
    }
  }

  void start(SettingValues settings) {
    settings.emplace_back("tcp.slice_kib", "8");
    settings.emplace_back("tcp.buffer_kib", "64");
    settings.emplace_back("tcp.stall_ms", "500");
    for (size_t host : {0, 1}) {
      memory_[host].assign(kPage * kPages, static_cast<char>('a' + host));
      hosts_->on(host, [&] {
        agents_[host] =
            Agent::create({.name = host == 0 ? "alpha" : "beta",
                           .worker = {.providers = {"tcp"},
                                      .key = *ClusterKey::from_bytes("0123456789abcdef"),
                                      .listen_host = "0.0.0.0",
                                      .settings = settings},
                           .serve_metadata = true})
                .value();
        ASSERT_TRUE(agents_[host]->register_memory({{at(host), kPage * kPages, 0}}).ok());
      });
    }
  }
  uint64_t at(size_t host, size_t page = 0) {
    return reinterpret_cast<uint64_t>(memory_[host].data()) + page * kPage;
  }
  char* page(size_t host, size_t number) { return memory_[host].data() + number * kPage; }
  WireFaults both(const WireFaults& faults) {
    hosts_->change([&](Hosts& it) { it.wire(0).faults(0) = it.wire(0).faults(1) = faults; });
    return faults;
  }

  template <typename Fact>
  void until(size_t host, const Fact& fact, CallSite from = CallSite::here()) {
    const auto state = [&] { return state_of(agents_[host]->stats().worker, "here"); };
    hosts_->on(host, [&] { baton::until(fact, LetOthersRun(), state, from); });
  }
  void meet() {
    hosts_->on(0, [&] {
      const std::string there = Hosts::address(1) + ':' + std::to_string(agents_[1]->port());
      EXPECT_TRUE(agents_[0]->fetch_metadata("beta", there).ok());
    });
    until(0, [&] { return agents_[0]->has_remote("beta"); });
  }

  // By other means than the network.
  void introduce() {
    hosts_->on(0, [&] { EXPECT_TRUE(agents_[0]->add_remote(*agents_[1]->metadata()).ok()); });
  }

  // A write of some pages of alpha's to the same of beta's, posted.
  AgentTransferId post(size_t first, size_t count, std::string_view message, Op op = Op::kWrite) {
    AgentTransferId id;
    hosts_->on(0, [&] {
      std::vector<Descriptor> here, there;
      for (size_t i = first; i < first + count; ++i) {
        here.push_back({at(0, i), kPage, 0});
        there.push_back({at(1, i), kPage, 0});
      }
      id = agents_[0]->make_transfer(op, here, there, "beta", message).value();
      ASSERT_EQ(agents_[0]->post(id), absl::OkStatus());
    });
    return id;
  }
  // Some of what was posted is on its way.
  AgentTransferId post_and_begin(size_t first, size_t count, Op op) {
    const auto begun = [&] { return agents_[0]->stats().worker.slices_posted; };
    const uint64_t before = begun();
    const AgentTransferId id = post(first, count, "", op);
    until(0, [&] { return begun() > before; });
    return id;
  }
  absl::Status wait(AgentTransferId id) {
    absl::Status status;
    hosts_->on(0, [&] { status = agents_[0]->wait(id, kLong); });
    return status;
  }
  absl::Status release(AgentTransferId id, Time timeout) {
    absl::Status status;
    hosts_->on(0, [&] { status = agents_[0]->release(id, timeout); });
    return status;
  }

  std::optional<MovingHosts> hosts_;
  std::array<std::vector<char>, 2> memory_;  // outlives the agents
  std::array<std::unique_ptr<Agent>, 2> agents_;
};

// What was posted has not ended when the next thing happens, on a slow machine either.
const WireFaults kSlow = {.bytes_per_s = 20'000};
// Redialled for longer than any fault here lasts.
const SettingValues kSurvives = {
    {"peer.answer_ms", "600000"}, {"peer.redial_ms", "100000"}, {"tcp.handshake_ms", "1500"}};

// Soon, but not because a machine is busy for a moment.
const SettingValues kGivesUp = {
    {"peer.answer_ms", "1500"}, {"peer.redial_ms", "1500"}, {"tcp.handshake_ms", "20000"}};

TEST_F(AgentNetwork, MetadataIsFetchedWhenThePartitionIsOver) {
  start(kSurvives);
  both({.cut = true});
  hosts_->on(0, [&] {
    const std::string there = Hosts::address(1) + ':' + std::to_string(agents_[1]->port());
    EXPECT_TRUE(agents_[0]->fetch_metadata("beta", there).ok());
    EXPECT_FALSE(agents_[0]->has_remote("beta"));
  });
  std::this_thread::sleep_for(milliseconds(100));
  both({});
  until(0, [&] { return agents_[0]->has_remote("beta"); });
}

// Promise(agents): Between two hosts whose network fails for a while, transfers finish and each
//   message arrives once | sessions outlive their rails
TEST_F(AgentNetwork, EveryTransferAndMessageArrivesOnceWhateverTheNetworkDoes) {
  start(kSurvives);
  meet();
  const uint64_t only = number_of("BATON_SEED", UINT64_MAX);
  std::mt19937_64 random(only == UINT64_MAX ? 7 : only);
  const auto pick = [&](size_t limit) { return static_cast<size_t>(random() % limit); };
  const size_t rounds = number_of("BATON_SEEDS", kSanitized ? 3 : 6);
  std::map<std::string, int> sent, got;
  for (size_t round = 0; round < rounds; ++round) {
    const std::string name = "transfer " + std::to_string(round);
    SCOPED_TRACE(name);
    const char fill = static_cast<char>('A' + round % 26);
    std::fill_n(page(0, 0), kPage * 8, fill);
    const size_t kind = pick(8), host = pick(2);
    const bool moves = kind == 6;
    const AgentTransferId id = post(0, 8, name);
    hosts_->change([&](Hosts& it) {
      WireFaults& faults = it.wire(0).faults(host);
      if (kind == 0) faults.loss = 0.05;
      if (kind == 1) faults = {.delay = milliseconds(5), .jitter = milliseconds(10)};
      if (kind == 2) it.wire(0).faults(0).cut = it.wire(0).faults(1).cut = true;
      if (kind == 3) faults.cut = true;
      if (kind == 4) it.set_link(host, 0, false);
      if (kind == 5) it.wire(0).forget_connections(pick(2) == 0);
      if (moves) it.set_address(host, 0, Hosts::address(host, 0, 10 + pick(200)));
      if (kind == 7) faults.largest = 500;
    });
    sent[name] = 1;
    // Beside it, messages without transfers, while the network is as it is.
    hosts_->on(0, [&] {
      for (int i = 0; i < 3; ++i) {
        const std::string words = name + ", word " + std::to_string(i);
        ASSERT_TRUE(agents_[0]->notify("beta", words).ok());
        sent[words] = 1;
      }
      // In several frames.
      const std::string words = name + std::string(150'000, fill);
      ASSERT_TRUE(agents_[0]->notify("beta", words).ok());
      sent[words] = 1;
    });
    std::this_thread::sleep_for(milliseconds(pick(pick(3) == 0 ? 1200 : 100)));
    hosts_->change([&](Hosts& it) {
      it.wire(0).heal();
      if (kind == 4) it.set_link(host, 0, true);
    });
    const absl::Status status = wait(id);
    ASSERT_TRUE(status.ok()) << status << ", kind " << kind;
    EXPECT_EQ(std::count(page(1, 0), page(1, 8), fill), static_cast<ptrdiff_t>(8 * kPage));
    EXPECT_TRUE(release(id, kLong).ok());
  }
  until(1, [&] {
    for (const AgentMessage& each : agents_[1]->messages()) ++got[each.payload];
    return got.size() >= sent.size();
  });
  EXPECT_EQ(got, sent);
}

// Every machine with docker has 172.17.0.1. Called there, one reaches oneself, where nobody listens
// at that port: it says nothing of the other host.
TEST_F(AgentNetwork, AnAddressThatBothHostsHaveEndsNoSession) {
  hosts_->change([](Hosts& it) {
    for (size_t host : {0, 1}) {
      it.set_link(host, 1, true);
      it.set_address(host, 1, "172.17.0.1");
    }
  });
  start(kSurvives);
  meet();
  EXPECT_TRUE(wait(post(0, 4, "before")).ok());
  hosts_->change([](Hosts& it) { it.set_link(0, 0, false); });
  const AgentTransferId id = post(0, 4, "meanwhile");
  until(0, [&] { return agents_[0]->stats().worker.peers_lost > 0; });
  std::this_thread::sleep_for(milliseconds(500));  // for calls that reach nobody
  hosts_->change([](Hosts& it) { it.set_link(0, 0, true); });
  EXPECT_EQ(wait(id), absl::OkStatus());
}

TEST_F(AgentNetwork, WhatIsReleasedInAPartitionMovesNothingAfterwards) {
  start(kSurvives);
  meet();
  EXPECT_TRUE(wait(post(0, 1, "")).ok());
  both(kSlow);
  for (int round = 0; round < 4; ++round) {
    const AgentTransferId id = post_and_begin(0, kPages, round % 2 == 0 ? Op::kWrite : Op::kRead);
    std::this_thread::sleep_for(milliseconds(30));
    both({.cut = true});
    const absl::Status early = release(id, milliseconds(50));
    both({});
    // A read is over at once: what still comes of it is thrown away here.
    const bool over = early.ok() && round % 2 == 1;
    EXPECT_TRUE(over || absl::IsDeadlineExceeded(early)) << early;
    ASSERT_EQ(over ? early : release(id, kLong), absl::OkStatus());
    for (size_t host : {0, 1}) std::fill(memory_[host].begin(), memory_[host].end(), 'x');
    EXPECT_TRUE(wait(post(0, 1, "")).ok());  // behind all that was under way
    for (size_t host : {0, 1}) {
      EXPECT_EQ(std::count(memory_[host].begin(), memory_[host].end(), 'x'),
                static_cast<ptrdiff_t>(kPages * kPage));
    }
    both(kSlow);
  }
}

TEST_F(AgentNetwork, WhatIsDeregisteredInAPartitionIsNotTouchedAfterwards) {
  start(kSurvives);
  meet();
  for (int round = 0; round < 3; ++round) {
    EXPECT_TRUE(wait(post(0, 1, "")).ok());
    both(kSlow);
    const AgentTransferId id = post(0, kPages, "");
    std::this_thread::sleep_for(milliseconds(30));
    both({.cut = true});
    const Descriptor whole{at(1), kPage * kPages, 0};
    hosts_->on(1, [&] { EXPECT_TRUE(agents_[1]->deregister_memory({whole}).ok()); });
    std::fill(memory_[1].begin(), memory_[1].end(), 'x');
    both({});
    const absl::Status status = wait(id);
    EXPECT_FALSE(status.ok() || absl::IsDeadlineExceeded(status)) << status;
    EXPECT_TRUE(release(id, kLong).ok());
    EXPECT_EQ(std::count(memory_[1].begin(), memory_[1].end(), 'x'),
              static_cast<ptrdiff_t>(kPages * kPage));
    hosts_->on(1, [&] { EXPECT_TRUE(agents_[1]->register_memory({whole}).ok()); });
    introduce();
    EXPECT_TRUE(wait(post(0, 4, "")).ok());
  }
}

TEST_F(AgentNetwork, OneThatIsRemovedInAPartitionMayBeMetAgainInIt) {
  start(kSurvives);
  meet();
  for (int round = 0; round < 2; ++round) {
    both(kSlow);
    const AgentTransferId id = post(0, kPages, "");
    std::this_thread::sleep_for(milliseconds(20));
    both({.cut = true});
    hosts_->on(0, [&] {
      agents_[0]->remove_remote("beta");
      EXPECT_FALSE(agents_[0]->has_remote("beta"));
    });
    introduce();
    const AgentTransferId next = post(0, 4, "again");
    both({});
    absl::Status status = wait(next);
    ASSERT_TRUE(status.ok()) << status;
    status = wait(id);
    EXPECT_FALSE(status.ok() || absl::IsDeadlineExceeded(status)) << status;
    status = release(id, kLong);
    EXPECT_TRUE(status.ok()) << status;
    std::fill(memory_[1].begin(), memory_[1].end(), 'x');
    EXPECT_TRUE(wait(post(0, 1, "")).ok());
    EXPECT_EQ(std::count(memory_[1].begin(), memory_[1].end(), 'x'),
              static_cast<ptrdiff_t>((kPages - 1) * kPage));
  }
}

TEST_F(AgentNetwork, AgentsThatGaveEachOtherUpMeetAgain) {
  start(kGivesUp);
  meet();
  EXPECT_TRUE(wait(post(0, 1, "before")).ok());
  both({.cut = true});
  const AgentTransferId lost = post(0, 4, "lost");
  EXPECT_TRUE(absl::IsUnavailable(wait(lost)));
  hosts_->on(0, [&] { EXPECT_FALSE(agents_[0]->has_remote("beta")); });
  both({});
  meet();
  EXPECT_EQ(wait(post(0, 4, "found")), absl::OkStatus());
  std::vector<std::string> got;
  until(1, [&] {
    for (const AgentMessage& each : agents_[1]->messages()) got.push_back(each.payload);
    return !got.empty() && got.back() == "found";
  });
  EXPECT_EQ(got.front(), "before");
  EXPECT_LE(got.size(), 3u);  // of "lost" nobody knows
}

// What was on its way to an agent that is given up may still land there: it cannot know.
TEST_F(AgentNetwork, AReleaseThatGaveTheOtherAgentUpIsNotOk) {
  start(kGivesUp);
  meet();
  const AgentTransferId first = post(0, 1, "");
  EXPECT_TRUE(wait(first).ok());
  EXPECT_TRUE(release(first, kLong).ok());
  // Packets to beta take long; nothing comes from it.
  hosts_->change([&](Hosts& it) {
    it.wire(0).faults(0).delay = seconds(30);
    it.wire(0).faults(1).cut = true;
  });
  const AgentTransferId write = post_and_begin(0, 4, Op::kWrite);
  EXPECT_THAT(release(write, kLong), fails_with(Code::kUnavailable, {"may land there"}));
  EXPECT_TRUE(absl::IsNotFound(release(write, kLong)));  // but released
  EXPECT_EQ(agents_[0]->stats().transfers, 0u);
}

}  // namespace
}  // namespace baton::kvtransfer
