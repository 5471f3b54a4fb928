// Names of hosts that DNS is slow about: whoever asks for one waits for it, and nobody else.
#include "tests/held_port.h"
#include "tests/kvtransfer/agent_pair.h"
#include "tests/slow_dns.h"
#include "tests/test.h"

namespace baton::kvtransfer {
namespace {

// Each would wait for ever if a lookup held the agent.
void use(Agent& agent) {
  std::vector<uint8_t> bytes(4096);
  const Descriptor range{reinterpret_cast<uint64_t>(bytes.data()), bytes.size(), 0};
  ASSERT_TRUE(agent.register_memory({range}).ok());
  const auto list = must(agent.prepare_local({range}));
  EXPECT_TRUE(agent.metadata().ok());
  EXPECT_FALSE(agent.has_remote("absent"));
  EXPECT_TRUE(agent.messages().empty());
  EXPECT_EQ(agent.stats().lists, 1U);
  EXPECT_TRUE(agent.send_metadata("127.0.0.1:1").ok());
  EXPECT_TRUE(agent.release_list(list).ok());
  EXPECT_TRUE(agent.deregister_memory({range}).ok());
}

TEST(AgentNames, NamesOfHostsAreAsked) {
  for (const char* name : {"host:80", "a.b:1", "10.example:80"})
    EXPECT_TRUE(asks_dns(name)) << name;
  for (const char* none :
       {"", "host", "80", "host:", "host:80x", "127.0.0.1:80", "[::1]:80", "[fe80::1%eth0]:80"}) {
    EXPECT_FALSE(asks_dns(none)) << none;
  }
}

TEST(AgentNames, ADnsLookupDelaysNoOtherPeer) {
  const auto a = make_agent(agent_options("alpha"));
  const auto there = make_server();
  const std::string where = "slow.example:" + std::to_string(there->port());
  std::thread caller([&] { EXPECT_TRUE(a->fetch_metadata("server", where).ok()); });
  std::thread another([&] { EXPECT_TRUE(a->send_metadata(where).ok()); });
  dns_asked.acquire();
  dns_asked.acquire();
  use(*a);
  dns_answered.release(2);
  caller.join();
  another.join();
  run_agents(*a, *there, [&] { return a->has_remote("server") && there->has_remote("alpha"); });
}

TEST(AgentNames, AskingWaitsForNoDns) {
  while (dns_asked.try_acquire() || dns_answered.try_acquire()) continue;  // of the tests before
  const auto a = make_agent(agent_options("alpha"));
  const auto there = make_server();
  const std::string where = "slow.example:" + std::to_string(there->port());
  // Here DNS has not answered yet, and it is asked once.
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(a->ask_metadata("server", where).ok());
  dns_asked.acquire();
  EXPECT_TRUE(a->ask_metadata("server", where).ok());
  EXPECT_FALSE(dns_asked.try_acquire());
  use(*a);
  dns_answered.release();
  run_agents(*a, *there, [&] {
    EXPECT_TRUE(a->ask_metadata("server", where).ok());
    return a->has_remote("server");
  });
  EXPECT_FALSE(dns_asked.try_acquire());
}

// A caller that repeats its question fills no queue of an agent that has not answered yet.
TEST(AgentNames, AQuestionIsSentOnceUntilItsPeerIsConnected) {
  const auto a = make_agent(agent_options("alpha"));
  const auto there = make_server();
  const std::string where = listener_of(*there);
  for (int i = 0; i < 10'000; ++i) ASSERT_TRUE(a->ask_metadata("", where).ok()) << i;
  run_agents(*a, *there, [&] { return a->name_at(where).value_or("") == "server"; });
}

TEST(AgentNames, AskingSaysOnceThatThereIsNoSuchHost) {
  const auto a = make_agent(agent_options("alpha"));
  for (int i = 0; i < 2; ++i) {
    absl::Status said;
    until([&] { return !said.ok(); }, [&] { said = a->ask_metadata("server", "no such host:1"); });
    EXPECT_THAT(std::string(said.message()), testing::HasSubstr("no such host"));
    EXPECT_TRUE(a->ask_metadata("server", "no such host:1").ok()) << "it is looked up again";
  }
  EXPECT_FALSE(a->ask_metadata("server", "127.0.0.1").ok());
}

TEST(AgentNames, ASecondCallLooksUpInParallel) {
  const uint16_t port = quiet_port();  // nobody is there now
  const auto a = make_agent(agent_options("alpha"));
  dns_answered.release();
  ASSERT_TRUE(a->fetch_metadata("server", "slow.example:" + std::to_string(port)).ok());
  dns_asked.acquire();
  // It is refused, and called again by whoever looks.
  until([&] { return dns_asked.try_acquire(); }, [&] { EXPECT_FALSE(a->has_remote("server")); });
  use(*a);
  const auto there = make_server("", true, port);
  ASSERT_NE(there, nullptr);
  dns_answered.release(20);
  run_agents(*a, *there, [&] { return a->has_remote("server"); });
}

TEST(AgentNames, DestructionWaitsForTheLookup) {
  while (dns_asked.try_acquire() || dns_answered.try_acquire()) continue;  // of the tests before
  const std::string where = "slow.example:" + std::to_string(quiet_port());
  auto a = make_agent(agent_options("alpha"));
  const auto b = make_agent(agent_options("beta"));
  introduce(*a, *b);
  ASSERT_TRUE(a->notify("beta", "hello").ok());
  run_agents(*a, *b, [&] { return b->stats().worker.peers_up == 1; });
  dns_answered.release();
  ASSERT_TRUE(a->fetch_metadata("server", where).ok());
  dns_asked.acquire();
  until([&] { return dns_asked.try_acquire(); }, [&] { EXPECT_FALSE(a->has_remote("server")); });
  std::jthread ends([&] { a = nullptr; });
  // As long as this test likes: it would hear of the end at once.
  const Time later = Clock::steady().now() + std::chrono::milliseconds(200);
  while (Clock::steady().now() < later && !HasFailure()) {
    b->progress();
    EXPECT_EQ(b->stats().worker.peers_up, 1U);
  }
  dns_answered.release();
  ends.join();
  until([&] { return b->stats().worker.peers_up == 0; }, [&] { b->progress(); });
}

}  // namespace
}  // namespace baton::kvtransfer
