// A paged cache of an agent's, in the host's memory or in a device's, for tests.
#pragma once

#include "kvtransfer/agent_kv.h"
#include "tests/gpudirect/agents/device_agents.h"
#include "tests/kvtransfer/requantise/requantised.h"
#include "tests/std.h"

namespace baton::kvtransfer {

// Ends before its agent, or was left by it.
class DeviceCache {
 public:
  DeviceCache(Agent& agent, InstalledFake& driver, KvLayout layout, Block::Of of, int device = 0) {
    std::vector<Descriptor> ranges;
    for (const KvBuffer& buffer : layout.buffers) {
      blocks_.push_back(std::make_unique<Block>(of, agent, driver, buffer.bytes, 5, device));
      ranges.push_back(blocks_.back()->whole());
    }
    const auto made = KvPlacement::of(std::move(layout), ranges, blocks_.front()->kind());
    EXPECT_TRUE(made.ok()) << made.status();
    place = *made;
  }
  // NaN and all.
  void fill(uint32_t seed) {
    std::mt19937 random(seed);
    for (const auto& block : blocks_) {
      std::vector<std::byte> bytes(block->whole().bytes);
      for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
      block->put(bytes);
    }
  }
  CacheBytes bytes() const {
    CacheBytes out;
    for (const auto& block : blocks_) out.push_back(block->bytes());
    return out;
  }
  Block& block(size_t number) { return *blocks_[number]; }
  void leave_agent() {
    for (const auto& block : blocks_) block->leave_agent();
  }

  KvPlacement place;

 private:
  std::vector<std::unique_ptr<Block>> blocks_;
};

// What a plan of this agent's is asked for.
inline AgentKvRequest request_of(Op op, const RequantisedBlocks& of) {
  AgentKvRequest request{.tokens = of.tokens, .layers = of.layers};
  request.local = {{op == Op::kWrite ? of.from : of.to}};
  request.remote = {{op == Op::kWrite ? of.to : of.from}};
  return request;
}

}  // namespace baton::kvtransfer
