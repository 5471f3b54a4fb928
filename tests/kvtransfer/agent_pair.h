// Two agents in one process, with memory of their own, for tests.
#pragma once

#include "kvtransfer/agent.h"
#include "tests/test.h"
#include "tests/until.h"

namespace baton::kvtransfer {

// A memory that an agent has registered. Byte i is `seed` + i, in a pattern of 251.
struct AgentMemory {
  AgentMemory(Agent& agent, size_t size, int seed) : bytes(size) {
    for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<uint8_t>((i * 7 + seed) % 251);
    EXPECT_EQ(agent.register_memory({{address(), size, 0}}), absl::OkStatus());
  }
  uint64_t address(size_t offset = 0) const {
    return reinterpret_cast<uint64_t>(bytes.data()) + offset;
  }
  Descriptor whole() const { return {address(), bytes.size(), 0}; }
  // `count` pages, evenly spread.
  std::vector<Descriptor> pages(size_t page, size_t count) const {
    std::vector<Descriptor> out;
    const size_t stride = bytes.size() / count;
    for (size_t i = 0; i < count; ++i) out.push_back({address(i * stride), page, 0});
    return out;
  }
  std::vector<uint8_t> bytes;
};

inline AgentOptions agent_options(const std::string& name, const std::string& provider = "",
                                  bool thread = true) {
  AgentOptions options;
  options.name = name;
  options.worker.key = *ClusterKey::from_bytes("the cluster key of the agents' tests");
  if (!provider.empty()) {
    options.worker.providers = {provider};
    options.worker.require = provider;
  }
  options.progress_thread = thread;
  return options;
}

inline std::unique_ptr<Agent> make_agent(AgentOptions options) {
  absl::StatusOr<std::unique_ptr<Agent>> agent = Agent::create(std::move(options));
  EXPECT_TRUE(agent.ok()) << agent.status();
  return agent.ok() ? *std::move(agent) : nullptr;
}

// One that takes metadata, and gives its own to who asks.
inline std::unique_ptr<Agent> make_server(const std::string& provider = "", bool thread = true,
                                          uint16_t port = 0) {
  AgentOptions options = agent_options("server", provider, thread);
  options.serve_metadata = true;
  options.worker.listen_port = port;
  return make_agent(std::move(options));
}

inline std::string listener_of(const Agent& agent) {
  return "127.0.0.1:" + std::to_string(agent.port());
}

inline std::string introduce(Agent& to, Agent& who) {
  const auto metadata = must(who.metadata());
  const absl::StatusOr<std::string> name = to.add_remote(metadata);
  EXPECT_TRUE(name.ok()) << name.status();
  return name.value_or("");
}

inline std::string state_of(const Agent& agent) {
  const AgentStats stats = agent.stats();
  return state_of(stats.worker, agent.name()) + std::to_string(stats.transfers) + " transfers, " +
         std::to_string(stats.remotes) + " remotes; ";
}

// Drives both until the fact holds.
template <typename Fact>
void run_agents(Agent& a, Agent& b, Fact&& fact, CallSite from = CallSite::here()) {
  const auto turn = [&] {
    const bool moved = a.progress();
    if (!b.progress() && !moved) std::this_thread::yield();
  };
  until(
      fact, turn, [&] { return state_of(a) + state_of(b); }, from);
}

}  // namespace baton::kvtransfer
