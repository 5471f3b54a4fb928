// The sockets of KV events: one publishes ours; one follows those of any number of engines (vLLM's,
// or our own as vLLM tells them) and says what each has cached.
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
#include "engine/kv_events/batch.h"
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

// Publishes KV events as vLLM does: over a PUB socket, and again on request over a ROUTER socket.
//
// A request for a replay has the frames [identity, "", first sequence number]; the answer is
// [identity, "", topic, sequence number, batch] for each batch from there on that is in the buffer,
// and at the end [identity, "", "", -1, ""].

struct PublisherStats {
  uint64_t batches = 0;   // published
  uint64_t replays = 0;   // asked for
  uint64_t replayed = 0;  // batches that they were
  // Times that more batches waited than max_queue_size. They are given up, and subscribers are told
  // to forget everything (AllBlocksCleared): better they know too little.
  uint64_t overflows = 0;
};

// With a thread of its own. It begins with a batch that says that the cache is empty, so that who
// followed an earlier process at the same endpoint knows.
class EventPublisher {
 public:
  // Unavailable: an endpoint is taken, or is no address of this machine. Unimplemented: this build
  // has no ZeroMQ.
  static absl::StatusOr<std::unique_ptr<EventPublisher>> start(const PublisherConfig& config);
  // What waits is sent first, for at most a fifth of a second.
  virtual ~EventPublisher() = default;

  // Any thread; never waits. Batches come out in the order of the calls.
  virtual void publish(EventBatch batch) = 0;
  virtual PublisherStats stats() const = 0;
  // As bound: a port 0 is a number now. "" where there is no replay.
  virtual const std::string& endpoint() const = 0;
  virtual const std::string& replay_endpoint() const = 0;
};

}  // namespace baton::engine::kv_events
