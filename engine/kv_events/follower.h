// Follows the KV events of any number of engines (vLLM's, or our own as vLLM tells them) and says
// what each has cached.
//
// event_order.h has what is done about lost batches and about engines that start anew,
// token_index.h how blocks are named.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "engine/kv_events/config.h"
#include "engine/kv_events/event_order.h"
#include "engine/serve/cache/cache_events.h"
#include "transport/clock.h"

namespace baton::engine::kv_events {

struct FollowerOptions {
  // A source that has said nothing for so long is asked for what did not come.
  std::chrono::milliseconds check_after{2000};
  // ... and one whose connection ended is called again.
  std::chrono::milliseconds again{500};
  std::chrono::milliseconds replay_timeout = patient(std::chrono::milliseconds(2000));
};

struct SourceStats {
  EventOrderStats order;
  uint64_t left_out = 0;  // blocks that no prompt's tokens name
};

// One thread for all of them.
class EventFollower {
 public:
  // Unimplemented: this build has no ZeroMQ.
  static absl::StatusOr<std::unique_ptr<EventFollower>> start(FollowerOptions options = {});
  virtual ~EventFollower() = default;

  // A snapshot as soon as what is known is all that can be, then changes; null: nothing is known,
  // until the next snapshot. On the follower's thread; never after leave() has returned.
  using OnNews = std::function<void(const serve::CacheNews*)>;
  // `name` is for the log. Returns an id. Nothing needs to be there yet.
  virtual uint64_t follow(std::string name, EventSource source, OnNews on_news) = 0;
  virtual void leave(uint64_t id) = 0;
  // What is known of it is not to be trusted any more.
  virtual void restart(uint64_t id) = 0;
  virtual SourceStats stats(uint64_t id) const = 0;
};

}  // namespace baton::engine::kv_events
