// What both ends of a session share: the agent, the mover, the clock, and how to wake a thread.
#pragma once

#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/status.h"
#include "kvtransfer/agent.h"
#include "kvtransfer/session/kv_mover.h"
#include "transport/clock.h"
#include "transport/timeline.h"

namespace baton::kvtransfer::session {

// 1: reads by name alone. 2: also wants that ask or are written to, and the word over. Who knows 1
// passes over the rest.
constexpr int kSessionVersion = 2;
constexpr uint32_t kMostRanks = 512;  // that a peer is believed

struct Core {
  std::unique_ptr<KvMover> mover;  // outlives the agent, which reads its memory
  std::shared_ptr<Agent> own;      // unless the agent is the caller's
  Agent* agent = nullptr;          // null: closed
  KvWorker shard;
  const Clock* clock = nullptr;
  Timeline* timeline = nullptr;
  bool may_be_read = true;  // by those that ask
  std::function<void()> wake_thread;
  std::function<void()> wake_engine;

  // ResourceExhausted: not now, for it does not take what was sent. Another error: it is gone.
  absl::Status tell(const std::string& whom, const nlohmann::json& message) const {
    return agent->notify(whom,
                         message.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
  }
};

inline double seconds(Time time) { return std::chrono::duration<double>(time).count(); }

// Picks among workers that hold the same heads by a name: always the same one for one decode
// worker, so that plans are reused.
inline uint64_t turn_of(absl::string_view name) {
  uint64_t turn = 0;
  for (const char c : name) turn = turn * 31 + static_cast<unsigned char>(c);
  return turn >> 1;  // JSON's numbers have a sign
}

// Whether it can be said in a message: it is UTF-8.
inline bool is_text(const std::string& name) {
  try {
    (void)nlohmann::json(name).dump();
  } catch (const nlohmann::json::exception&) {
    return false;
  }
  return true;
}

}  // namespace baton::kvtransfer::session
