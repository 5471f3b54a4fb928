// Publishes KV events as vLLM does: over a PUB socket, and again on request over a ROUTER socket.
//
// A request for a replay has the frames [identity, "", first sequence number]; the answer is
// [identity, "", topic, sequence number, batch] for each batch from there on that is in the buffer,
// and at the end [identity, "", "", -1, ""].
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "engine/kv_events/batch.h"
#include "engine/kv_events/config.h"

namespace baton::engine::kv_events {

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
