// An agent's messages: out to others, in from them, and the thread that answers for metadata.
#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kvtransfer/internal/agent_impl.h"
#include "transport/base/durations.h"
#include "transport/base/log.h"
#include "transport/base/wire.h"

namespace baton::kvtransfer {
namespace {

// A connector of release 0.1 asks for KV by messages of its own (versions 3 and 4): it hears at
// once that this release has none of them.
constexpr uint32_t kConnectorMagic = 0x764b7442;  // "BtKv"

void refuse_connector(Worker& worker, PeerId peer, std::string_view request) {
  base::WireReader in(request);
  const auto magic = in.number<uint32_t>();
  in.number<uint16_t>();  // version
  const auto kind = in.number<uint8_t>();
  in.number<uint8_t>();
  const auto load = in.number<uint64_t>();
  in.number<uint32_t>();  // bytes
  const auto offset = in.number<uint32_t>();
  constexpr uint8_t kRequest = 1, kFailed = 4;
  if (in.failed() || magic != kConnectorMagic || kind != kRequest || offset != 0) return;
  std::string body;
  base::put_number(body, static_cast<int32_t>(absl::StatusCode::kFailedPrecondition));
  base::put_text(body,
                 "this worker is of a release whose connectors have other messages "
                 "(docs/upgrading.md): install the same one on both workers");
  std::string out;
  base::put_number(out, kConnectorMagic);
  base::put_number(out, uint16_t{3});
  base::put_number(out, kFailed);
  base::put_number(out, uint8_t{0});
  base::put_number(out, load);
  base::put_number(out, static_cast<uint32_t>(body.size()));
  base::put_number(out, uint32_t{0});
  worker.notify_detached(peer, out + body).IgnoreError();
}

size_t kept_bytes(const AgentMessage& message) {
  return sizeof message + message.agent.size() + message.payload.size();
}

}  // namespace

void Agent::Impl::pump() {
  worker->help();
  outbox->flush_control_messages();
  say_again();
  std::lock_guard lock(inbox_mutex);
  const auto take_events = [&] {
    while (std::optional<PeerEvent> event = worker->next_peer_event()) {
      if (event->kind == PeerEvent::Kind::kUp) {
        senders[key_of(event->peer)] = {event->name, event->uid, {}};
      } else if (event->kind == PeerEvent::Kind::kDown) {
        down.push_back(key_of(event->peer));
      }
    }
  };
  take_events();
  bool all = false;
  for (Notification next; unread < kMostUnread;) {
    all = !worker->next_notification(next);
    if (all) break;
    auto sender = senders.find(key_of(next.peer));
    if (sender == senders.end()) {  // it came up after we looked
      take_events();
      sender = senders.find(key_of(next.peer));
      if (sender == senders.end()) {  // the worker forgets none before what it said is read
        base::log_event(base::LogLevel::kWarning, "%s: dropped a notification from an unknown peer",
                        options.name);
        continue;
      }
    }
    AgentFrame frame;
    const absl::StatusOr<bool> whole = sender->second.parts.add(next.payload, frame);
    if (!whole.ok()) {
      base::log_event(base::LogLevel::kWarning, "%s: dropped a notification of %s: %s",
                      options.name, sender->second.name, whole.status().message());
      refuse_connector(*worker, next.peer, next.payload);
    } else if (*whole) {
      hear(next.peer, std::move(frame));
    }
  }
  answer_who_asked();
  if (all) forget_who_went();
  // A thread that waits may have looked while a message was on its way from the worker to here.
  if (awaiting > 0 && unread > 0) worker->wake();
}

absl::StatusOr<std::string> Agent::Impl::name_at(std::string_view host_port) {
  pump();
  PeerId peer;
  {
    std::lock_guard lock(mutex);
    const auto known = callers.find(std::string(host_port));
    if (known == callers.end()) return std::string();
    peer = known->second;
    if (peer.generation != 0 && worker->peer_state(peer) == PeerState::kDown) {
      const absl::Status why = worker->peer_status(peer);
      looked_up.erase(std::string(host_port));  // that is what came of it
      callers.erase(known);                     // and not of what is asked from now on
      return absl::UnavailableError(why.ok() ? "its connection is down" : why.message());
    }
  }
  std::lock_guard lock(inbox_mutex);
  const auto sender = senders.find(key_of(peer));
  return sender == senders.end() ? std::string() : sender->second.name;
}

// Not before what they had sent is read.
void Agent::Impl::forget_who_went() {
  for (uint64_t peer : down) senders.erase(peer);
  down.clear();
  if (senders.size() > most_senders) {
    absl::erase_if(senders, [&](const auto& entry) {
      return worker->peer_state(peer_of_key(entry.first)) == PeerState::kDown;
    });
    most_senders = std::max(kFewSenders, 2 * senders.size());
  }
  absl::erase_if(asking, [&](const auto& entry) { return !senders.contains(entry.first); });
}

// Whoever asks again and again has one answer under way: each is a copy of all metadata, and in
// time all transfers would be answers.
void Agent::Impl::answer_who_asked() {
  for (auto next = asking.begin(); next != asking.end();) {
    const auto here = next++;
    if (outbox->is_sending(here->second, AgentFrameKind::kMetadata)) continue;
    std::string mine;
    {
      std::lock_guard lock(mutex);
      mine = whole_metadata().encode(key);
    }
    const absl::Status sent = send(here->second, AgentFrameKind::kMetadata, mine);
    if (!absl::IsResourceExhausted(sent)) asking.erase(here);
  }
}

void Agent::Impl::hear(PeerId peer, AgentFrame frame) {
  const Sender& sender = senders[key_of(peer)];
  switch (frame.kind) {
    case AgentFrameKind::kMessage:
      inbox.push_back({sender.name, std::move(frame.payload)});
      unread += kept_bytes(inbox.back());
      return;
    case AgentFrameKind::kMetadata: {
      bool wanted = options.serve_metadata;
      {
        std::lock_guard lock(mutex);
        wanted |= fetching.erase(sender.name) > 0;
      }
      if (!wanted) return;
      const absl::StatusOr<std::string> loaded = add_remote(frame.payload, &sender);
      if (loaded.ok()) {
        remember_told(*loaded, key_of(peer));
      } else {
        base::log_event(base::LogLevel::kWarning, "%s: metadata from %s: %s", options.name,
                        sender.name, loaded.status().message());
        std::lock_guard lock(mutex);
        refused = {sender.name, absl::StrCat("its metadata arrived but was refused: ",
                                             loaded.status().message())};
      }
      return;
    }
    case AgentFrameKind::kFetch: {
      if (!options.serve_metadata) return;
      if (!frame.payload.empty() && frame.payload != options.name) return;
      asking.emplace(key_of(peer), peer);
      return;
    }
    case AgentFrameKind::kInvalidate:
      // Its own, and no other agent's.
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
                     (worker->stats().notifications_waiting > 0 && unread < kMostUnread);
            },
            std::chrono::milliseconds(100))
        .IgnoreError();
    pump();
  }
}

absl::Status Agent::Impl::notify(std::string_view agent, std::string_view message) {
  if (absl::Status status = check_message(message); !status.ok()) return status;
  absl::StatusOr<PeerId> peer;
  absl::Status lost;
  {
    std::lock_guard lock(mutex);
    absl::StatusOr<RemoteAgent*> remote = find_remote(agent);
    if (!remote.ok()) return remote.status();
    peer = peer_of(**remote);
    lost = (*remote)->lost;
  }
  if (!peer.ok()) return peer.status();
  if (!lost.ok()) {
    // It is being called again, and one that is back answers within a moment. Without a thread
    // nothing moves here meanwhile.
    constexpr std::chrono::milliseconds kMoment{100};
    const auto connecting = [&] { return worker->peer_state(*peer) == PeerState::kConnecting; };
    if (progress_thread != nullptr) {
      worker->wait_until([&] { return !connecting(); }, kMoment).IgnoreError();
    }
    if (worker->peer_state(*peer) != PeerState::kUp) {
      return absl::UnavailableError(
          absl::StrFormat("agent \"%s\" is gone: %s. Each send to it tries to reconnect; if it was "
                          "restarted, load its new metadata",
                          agent, lost.message()));
    }
  }
  absl::Status sent = outbox->send_message(agent, *peer, message);
  drive();
  return sent;
}

std::vector<AgentMessage> Agent::Impl::messages() {
  std::vector<AgentMessage> out;
  for (bool more = true; more;) {
    pump();
    more = unread >= kMostUnread;  // the worker may have others
    take_messages(out, SIZE_MAX);
  }
  return out;
}

void Agent::Impl::take_messages(std::vector<AgentMessage>& out, size_t most) {
  std::lock_guard lock(inbox_mutex);
  for (; most > 0 && !inbox.empty(); --most) {
    unread -= kept_bytes(inbox.front());
    out.push_back(std::move(inbox.front()));
    inbox.pop_front();
  }
}

std::vector<AgentMessage> Agent::Impl::wait_messages(Time timeout, size_t most) {
  const Time end = base::deadline_after(worker->clock().now(), timeout);
  const auto there = [this] { return unread > 0 || worker->stats().notifications_waiting > 0; };
  std::vector<AgentMessage> out;
  ++awaiting;
  for (bool goes_on = true; goes_on;) {
    pump();
    take_messages(out, most);
    if (!out.empty()) break;
    goes_on = worker->wait_until(there, end - worker->clock().now()).ok();
  }
  --awaiting;
  return out;
}

}  // namespace baton::kvtransfer
