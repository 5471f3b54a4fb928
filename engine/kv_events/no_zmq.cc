// In place of publisher.cc and follower.cc where there is no ZeroMQ.
#include "engine/kv_events/sockets.h"

namespace baton::engine::kv_events {

absl::Status can_publish() {
  return absl::UnimplementedError(
      "this build of baton has no ZeroMQ and therefore no KV events: install libzmq3-dev and "
      "cppzmq-dev "
      "and build it again");
}

absl::StatusOr<std::unique_ptr<EventPublisher>> EventPublisher::start(const PublisherConfig&) {
  return can_publish();
}

absl::StatusOr<std::unique_ptr<EventFollower>> EventFollower::start(FollowerOptions) {
  return can_publish();
}

}  // namespace baton::engine::kv_events
