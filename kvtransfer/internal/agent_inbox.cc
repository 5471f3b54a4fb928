// An agent's messages: out to others, in from them, and the thread that answers for metadata.
#include <utility>

#include "kvtransfer/internal/agent_impl.h"
#include "transport/base/log.h"

namespace baton::kvtransfer {

void Agent::Impl::pump() {
  worker->help();
  say_again();
  std::lock_guard lock(inbox_mutex);
  std::vector<uint64_t> gone;
  const auto take_events = [&] {
    while (std::optional<PeerEvent> event = worker->next_peer_event()) {
      if (event->kind == PeerEvent::Kind::kUp) {
        senders[key_of(event->peer)] = {event->name, event->uid, {}};
      } else if (event->kind == PeerEvent::Kind::kDown) {
        gone.push_back(key_of(event->peer));
      }
    }
  };
  take_events();
  for (Notification next; worker->next_notification(next);) {
    auto sender = senders.find(key_of(next.peer));
    if (sender == senders.end()) {  // it came up after we looked
      take_events();
      sender = senders.find(key_of(next.peer));
      if (sender == senders.end()) continue;
    }
    AgentFrame frame;
    const absl::StatusOr<bool> whole = sender->second.parts.add(next.payload, frame);
    if (!whole.ok()) {
      base::log_event(base::LogLevel::kWarning, "%s: dropped a notification of %s: %s",
                      options.name, sender->second.name, whole.status().message());
    } else if (*whole) {
      hear(next.peer, std::move(frame));
    }
  }
  // Not before what they had sent is read.
  for (uint64_t peer : gone) senders.erase(peer);
}

void Agent::Impl::hear(PeerId peer, AgentFrame frame) {
  const Sender& sender = senders[key_of(peer)];
  switch (frame.kind) {
    case AgentFrameKind::kMessage:
      inbox.push_back({sender.name, std::move(frame.payload)});
      return;
    case AgentFrameKind::kMetadata: {
      bool wanted = options.serve_metadata;
      {
        std::lock_guard lock(mutex);
        wanted |= fetching.erase(sender.name) > 0;
      }
      if (!wanted) return;
      const absl::StatusOr<std::string> loaded = add_remote(frame.payload);
      if (!loaded.ok()) {
        base::log_event(base::LogLevel::kWarning, "%s: metadata from %s: %s", options.name,
                        sender.name, loaded.status().message());
      }
      return;
    }
    case AgentFrameKind::kFetch: {
      if (!options.serve_metadata || frame.payload != options.name) return;
      std::string mine;
      {
        std::lock_guard lock(mutex);
        mine = whole_metadata().encode(key);
      }
      send(peer, AgentFrameKind::kMetadata, mine).IgnoreError();  // it asks again
      return;
    }
    case AgentFrameKind::kInvalidate:
      // Its own, and nobody else's.
      if (options.serve_metadata) remove_remote(sender.name, &sender.uid);
      return;
    case AgentFrameKind::kAbandon:
      return;  // the assembler's
  }
}

void Agent::Impl::serve() {
  while (!stopping.load(std::memory_order_relaxed)) {
    worker
        ->wait_until(
            [this] {
              return stopping.load(std::memory_order_relaxed) ||
                     worker->stats().notifications_waiting > 0;
            },
            std::chrono::milliseconds(100))
        .IgnoreError();
    pump();
  }
}

absl::Status Agent::Impl::notify(std::string_view agent, std::string_view message) {
  if (absl::Status status = check_message(message); !status.ok()) return status;
  absl::StatusOr<PeerId> peer;
  {
    std::lock_guard lock(mutex);
    absl::StatusOr<RemoteAgent*> remote = find_remote(agent);
    if (!remote.ok()) return remote.status();
    peer = peer_of(**remote);
  }
  if (!peer.ok()) return peer.status();
  absl::Status sent = outbox->send_message(agent, *peer, message);
  drive();
  return sent;
}

std::vector<AgentMessage> Agent::Impl::messages() {
  pump();
  std::lock_guard lock(inbox_mutex);
  std::vector<AgentMessage> out(std::make_move_iterator(inbox.begin()),
                                std::make_move_iterator(inbox.end()));
  inbox.clear();
  return out;
}

}  // namespace baton::kvtransfer
