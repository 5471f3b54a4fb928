// An agent and a cache of one layer, for tests of sessions.
#pragma once

#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "kvtransfer/agent.h"
#include "kvtransfer/session/direct_mover.h"
#include "tests/test.h"

namespace baton::kvtransfer {

using nlohmann::json;

inline constexpr size_t kBytes = 256, kBlocks = 8;

// Without `thread` it moves nothing while it is not called.
inline std::unique_ptr<Agent> session_agent(const std::string& name, bool thread) {
  AgentOptions options;
  options.name = name;
  options.serve_metadata = true;
  options.progress_thread = options.serve_thread = thread;
  options.worker.providers = {"tcp"};
  options.worker.key = *ClusterKey::from_bytes("a secret for these tests, 32 bytes long");
  return *Agent::create(std::move(options));
}

struct SessionSide {
  SessionSide(const std::string& name, bool thread,
              std::vector<std::byte> its_memory = std::vector<std::byte>(kBytes * kBlocks))
      : memory(std::move(its_memory)), its(session_agent(name, thread)) {
    const Descriptor range{address(), memory.size(), 0};
    EXPECT_TRUE(its->register_memory(absl::MakeConstSpan(&range, 1)).ok());
  }
  uint64_t address() const { return reinterpret_cast<uint64_t>(memory.data()); }
  std::byte* block(size_t number) { return memory.data() + number * kBytes; }
  json cache() const {
    return {{"identity", "a model"},
            {"rows", {{address(), kBytes, 0, kBytes, kBlocks}}},
            {"kinds", {{{"block_tokens", 16}, {"bytes", kBytes}, {"whole", "a test's"}}}},
            {"layers", {0}}};
  }
  // One that moves nothing but by turn(). `lease`: zero for the default.
  std::unique_ptr<KvSession> session(const Clock& clock, Time lease = Time::zero()) const {
    KvSessionOptions options;
    options.agent = its.get();
    options.clock = &clock;
    options.start_thread = false;
    if (lease != Time::zero()) options.lease = options.max_lease = lease;
    return *session::make_direct_session(cache().dump(), std::move(options));
  }
  std::vector<std::byte> memory;
  std::unique_ptr<Agent> its;
};

// With its session, which moves nothing but by turn().
struct SessionEnd : SessionSide {
  template <typename... Memory>
  SessionEnd(const std::string& name, const Clock& clock, Time lease = Time::zero(),
             bool thread = false, Memory... given)
      : SessionSide(name, thread, std::move(given)...),
        session(SessionSide::session(clock, lease)) {}
  ~SessionEnd() { session->close(); }
  std::unique_ptr<KvSession> session;
};

}  // namespace baton::kvtransfer
