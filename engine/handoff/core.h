// What both ends of a hand-off share: the agent, the cache, the memory in between, who we are.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/handoff/foreign_layout.h"
#include "engine/handoff/staging.h"
#include "engine/kernels/kv_cache.h"
#include "kvtransfer/agent.h"
#include "transport/clock.h"

namespace baton::engine::handoff {

struct Core {
  std::unique_ptr<kvtransfer::Agent> agent;
  std::unique_ptr<Staging> staging;
  std::string model;        // of the checkpoint: equal at both ends, or nothing is handed over
  std::string fingerprint;  // of this engine's arithmetic too: equal KV is equal to the bit
  const Clock* clock = nullptr;
  std::optional<KvCache> cache;
  ForeignLayout own;
  std::function<void()> wake_thread;
  std::function<void()> wake_engine;

  // How the cache lies of the peer that says so in `message`. An error that names what does not
  // fit: another model, or a cache that blocks of ours cannot be made for.
  absl::StatusOr<ForeignLayout> layout_in(const nlohmann::json& message) const;
  // ResourceExhausted: not now, for it does not take what was sent. Another error: it is gone.
  absl::Status tell(const std::string& whom, const nlohmann::json& message) const {
    return agent->notify(whom,
                         message.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
  }
};

// Whether it can be said in a message.
bool is_text(const std::string& name);

// The checksum of a block: CRC-32, as zlib's.
uint32_t block_checksum(const std::byte* block, size_t bytes);

}  // namespace baton::engine::handoff
