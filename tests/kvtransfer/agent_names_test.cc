// Names of hosts that DNS is slow about: whoever asks for one waits for it, and nobody else.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <netdb.h>

#include <cstring>
#include <semaphore>
#include <string>
#include <thread>

#include "tests/kvtransfer/agent_pair.h"

namespace {
std::counting_semaphore<> asked{0};
std::counting_semaphore<> answered{0};
}  // namespace

// In place of the C library's.
extern "C" int getaddrinfo(const char* node, const char* service, const addrinfo* hints,
                           addrinfo** found) {
  using Real = int (*)(const char*, const char*, const addrinfo*, addrinfo**);
  static const Real real = reinterpret_cast<Real>(dlsym(RTLD_NEXT, "getaddrinfo"));
  if (node == nullptr || std::strcmp(node, "slow.example") != 0) {
    return real(node, service, hints, found);
  }
  asked.release();
  answered.acquire();
  return real("127.0.0.1", service, hints, found);
}

namespace baton::kvtransfer {
namespace {

std::unique_ptr<Agent> server(uint16_t port = 0) {
  AgentOptions options = agent_options("server");
  options.serve_metadata = true;
  options.worker.listen_port = port;
  return make_agent(std::move(options));
}

// Each would wait for ever if a lookup held the agent.
void use(Agent& agent) {
  std::vector<uint8_t> bytes(4096);
  const Descriptor range{reinterpret_cast<uint64_t>(bytes.data()), bytes.size(), 0};
  ASSERT_TRUE(agent.register_memory({range}).ok());
  const auto list = agent.prepare_local({range});
  ASSERT_TRUE(list.ok());
  EXPECT_TRUE(agent.metadata().ok());
  EXPECT_FALSE(agent.has_remote("nobody"));
  EXPECT_TRUE(agent.messages().empty());
  EXPECT_EQ(agent.stats().lists, 1U);
  EXPECT_TRUE(agent.send_metadata("127.0.0.1:1").ok());
  EXPECT_TRUE(agent.release_list(*list).ok());
  EXPECT_TRUE(agent.deregister_memory({range}).ok());
}

TEST(AgentNames, NobodyElseWaitsForDns) {
  const auto a = make_agent(agent_options("alpha"));
  const auto there = server();
  const std::string where = "slow.example:" + std::to_string(there->port());
  std::thread caller([&] { EXPECT_TRUE(a->fetch_metadata("server", where).ok()); });
  std::thread another([&] { EXPECT_TRUE(a->send_metadata(where).ok()); });
  asked.acquire();
  asked.acquire();
  use(*a);
  answered.release(2);
  caller.join();
  another.join();
  run_agents(*a, *there, [&] { return a->has_remote("server") && there->has_remote("alpha"); });
}

TEST(AgentNames, WhoIsCalledAgainIsLookedUpBesides) {
  auto there = server();
  const uint16_t port = there->port();
  there = nullptr;  // nobody is there now
  const auto a = make_agent(agent_options("alpha"));
  answered.release();
  ASSERT_TRUE(a->fetch_metadata("server", "slow.example:" + std::to_string(port)).ok());
  asked.acquire();
  // It is refused, and called again by whoever looks.
  while (!asked.try_acquire()) EXPECT_FALSE(a->has_remote("server"));
  use(*a);
  there = server(port);
  answered.release(1'000'000);
  run_agents(*a, *there, [&] { return a->has_remote("server"); });
}

}  // namespace
}  // namespace baton::kvtransfer
