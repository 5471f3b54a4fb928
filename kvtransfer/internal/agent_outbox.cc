// An agent's messages go out as notifications, each in one frame or in several.
#include "kvtransfer/internal/agent_outbox.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace baton::kvtransfer {
namespace {

constexpr Time kPatience = std::chrono::seconds(10);

}  // namespace

absl::Status AgentOutbox::send_message(std::string_view agent, PeerId peer,
                                       std::string_view message) {
  auto sent = std::make_unique<Sent>(
      Sent{.outbox = *this, .peer = peer, .agent = std::string(agent), .number = ++messages_});
  if (message.size() > kMaxWholeAgentMessage) {
    sent->bytes = message;
    return send_parts(AgentFrameKind::kMessage, message, std::move(sent), kPatience);
  }
  sent->bytes = agent_frame(AgentFrameKind::kMessage, message);
  sent->skip = sent->bytes.size() - message.size();
  sent->open = 1;
  Sent* const raw = sent.release();
  absl::Status status = submit(peer, raw->bytes, raw);
  if (!status.ok()) ended(*raw, 1, status, true);
  return status;
}

absl::Status AgentOutbox::send(PeerId peer, AgentFrameKind kind, std::string_view payload) {
  auto sent = std::make_unique<Sent>(Sent{.outbox = *this, .peer = peer, .kind = kind});
  {
    std::lock_guard lock(mutex_);
    ++sending_[{key_of(peer), kind}];
  }
  if (payload.size() > kMaxWholeAgentMessage) {
    return send_parts(kind, payload, std::move(sent), Time::zero());
  }
  sent->open = 1;
  Sent* const raw = sent.release();
  absl::Status status = submit(peer, agent_frame(kind, payload), raw);
  if (!status.ok()) ended(*raw, 1, status, true);
  return status;
}

bool AgentOutbox::is_sending(PeerId peer, AgentFrameKind kind) const {
  std::lock_guard lock(mutex_);
  return sending_.contains({key_of(peer), kind});
}

absl::Status AgentOutbox::submit(PeerId peer, std::string_view frame, Sent* sent) {
  TransferRequest request{.op = Op::kWrite, .peer = peer, .notify = frame, .detached = true};
  if (sent != nullptr) {
    request.on_end = &AgentOutbox::on_end;
    request.context = sent;
  }
  return worker_.submit(request).status();
}

absl::Status AgentOutbox::submit_part(std::string_view frame, Sent& sent, Time patience) {
  absl::Status status;
  worker_
      .wait_until(
          [&] {
            status = submit(sent.peer, frame, &sent);
            return !absl::IsResourceExhausted(status);
          },
          patience)
      .IgnoreError();
  return status;
}

absl::Status AgentOutbox::send_parts(AgentFrameKind kind, std::string_view payload,
                                     std::unique_ptr<Sent> sent, Time patience) {
  flush_control_messages();
  if (absl::Status room = wait_for_room(sent->peer, payload.size(), patience); !room.ok()) {
    sent->open = 1;
    ended(*sent.release(), 1, room, true);
    return room;
  }
  const std::vector<std::string> frames = agent_frames(kind, payload);
  sent->parts_bytes = payload.size();
  sent->open = frames.size();
  Sent* const raw = sent.release();  // the end of its last frame frees it
  for (size_t i = 0; i < frames.size(); ++i) {
    // Once begun, a message is worth waiting for.
    absl::Status status = submit_part(frames[i], *raw, i == 0 ? Time::zero() : patience);
    if (status.ok()) continue;
    if (i > 0) abandon(*raw, frames[0], i);
    ended(*raw, frames.size() - i, status, true);
    return status;
  }
  return absl::OkStatus();
}

bool AgentOutbox::take_room(Parts& parts, size_t bytes) {
  if (parts.bytes + bytes > AgentAssembler::kMaxHeld) return false;
  parts.bytes += bytes;
  return true;
}

bool AgentOutbox::reserve(PeerId peer, size_t bytes) {
  std::lock_guard lock(mutex_);
  Parts& parts = parts_[key_of(peer)];
  return parts.line.empty() && take_room(parts, bytes);
}

bool AgentOutbox::reserve(PeerId peer, size_t bytes, const std::shared_ptr<AgentTransfer>& who) {
  std::lock_guard lock(mutex_);
  Parts& parts = parts_[key_of(peer)];
  const bool first = parts.line.empty() || parts.line.front().who == who.get();
  if (first && take_room(parts, bytes)) {
    if (!parts.line.empty()) parts.line.pop_front();
    parts.room_came = true;  // perhaps for the next one too
    return true;
  }
  const auto there =
      std::find_if(parts.line.begin(), parts.line.end(),
                   [&](const Parts::Waits& other) { return other.who == who.get(); });
  if (there == parts.line.end()) parts.line.push_back({who.get(), who});
  return false;
}

void AgentOutbox::leave_line(PeerId peer, const AgentTransfer& who) {
  std::lock_guard lock(mutex_);
  Parts& parts = parts_.find(key_of(peer))->second;  // kept while a caller waits
  std::erase_if(parts.line, [&](const Parts::Waits& other) { return other.who == &who; });
  forget_if_unused(peer);
}

void AgentOutbox::give_back(PeerId peer, size_t bytes) {
  std::lock_guard lock(mutex_);
  give_back_locked(peer, bytes);
}

void AgentOutbox::room_came(PeerId peer) {
  flush_control_messages();
  feed_line(peer);
}

// Whom it feeds may end, and give room back, in the middle of this: one thread does it for all, so
// that no agent's feed() is called in another's.
void AgentOutbox::feed_line(PeerId peer) {
  std::shared_ptr<AgentTransfer> next;  // freed without the lock
  for (bool begun = false;; begun = true) {
    next = nullptr;
    {
      std::lock_guard lock(mutex_);
      const auto at = parts_.find(key_of(peer));
      if (at == parts_.end()) return;
      Parts& parts = at->second;
      if (!begun) {
        parts.room_came = true;
        if (std::exchange(parts.feeding, true)) return;
      }
      if (parts.line.empty() || !std::exchange(parts.room_came, false)) {
        parts.feeding = false;
        return forget_if_unused(peer);
      }
      next = parts.line.front().transfer.lock();
      if (next == nullptr) {
        parts.line.pop_front();
        parts.room_came = true;
      }
    }
    if (next != nullptr) next->feed();
  }
}

absl::Status AgentOutbox::wait_for_room(PeerId peer, size_t bytes, Time patience) {
  if (worker_.wait_until([&] { return reserve(peer, bytes); }, patience).ok()) {
    return absl::OkStatus();
  }
  return absl::ResourceExhaustedError(
      "64 MiB of messages of more than 60,000 bytes are in flight to this agent: send more when it "
      "has received some of them");
}

void AgentOutbox::give_back_locked(PeerId peer, size_t bytes) {
  parts_.find(key_of(peer))->second.bytes -= bytes;
  forget_if_unused(peer);
}

void AgentOutbox::forget_if_unused(PeerId peer) {
  const auto at = parts_.find(key_of(peer));
  const Parts& parts = at->second;
  // What is unsaid has bytes.
  if (parts.bytes == 0 && parts.line.empty() && !parts.feeding) {
    parts_.erase(at);
  }
}

// The other agent must not keep what it has of the message for ever. Until it has been told, what
// it keeps is in the way of others.
void AgentOutbox::abandon(Sent& sent, std::string_view part, size_t parts) {
  auto word = std::make_unique<Sent>(Sent{.outbox = *this, .peer = sent.peer, .open = 1});
  word->bytes = abandon_frame(part, parts);
  {
    std::lock_guard lock(mutex_);
    word->parts_bytes = std::exchange(sent.parts_bytes, 0);
    send_later(std::move(word));
  }
  flush_control_messages();
}

void AgentOutbox::abandon(PeerId peer, std::string_view part, size_t bytes) {
  auto word =
      std::make_unique<Sent>(Sent{.outbox = *this, .peer = peer, .parts_bytes = bytes, .open = 1});
  word->bytes = abandon_frame(part, 0);
  std::lock_guard lock(mutex_);
  send_later(std::move(word));
}

void AgentOutbox::send_later(std::unique_ptr<Sent> word) {
  ++unsaid_;
  parts_[key_of(word->peer)].unsaid.push_back(std::move(word));
}

void AgentOutbox::flush_control_messages() {
  while (unsaid_ > 0) {
    std::unique_ptr<Sent> word;
    {
      std::lock_guard lock(mutex_);
      const auto some = std::find_if(parts_.begin(), parts_.end(), [](const auto& parts) {
        return !parts.second.unsaid.empty();
      });
      if (some == parts_.end()) return;
      word = std::move(some->second.unsaid.back());
      some->second.unsaid.pop_back();
      --unsaid_;
    }
    if (!submit(word->peer, word->bytes, word.get()).ok()) {  // there is no room
      std::lock_guard lock(mutex_);
      return send_later(std::move(word));
    }
    word.release();  // NOLINT(bugprone-unused-return-value): its end frees it
  }
}

void AgentOutbox::on_end(void* context, TransferId /*id*/, const absl::Status& status) {
  auto& sent = *static_cast<Sent*>(context);
  AgentOutbox& outbox = sent.outbox;
  outbox.ended(sent, 1, status, false);
  outbox
      .flush_control_messages();  // also to peers that have gone: what was kept there is free then
}

void AgentOutbox::ended(Sent& sent, size_t frames, const absl::Status& status, bool refused) {
  std::unique_ptr<Sent> last;  // freed after the lock
  {
    std::lock_guard lock(mutex_);
    if (sent.why.ok()) sent.why = status;
    sent.refused |= refused;
    sent.open -= frames;
    if (sent.open > 0) return;
    last.reset(&sent);
    if (sent.parts_bytes > 0) give_back_locked(sent.peer, sent.parts_bytes);
    note_end(sent);
  }
  if (sent.parts_bytes > 0) feed_line(sent.peer);
}

void AgentOutbox::note_end(Sent& sent) {
  if (const auto sending = sending_.find({key_of(sent.peer), sent.kind});
      sending != sending_.end() && --sending->second == 0) {
    sending_.erase(sending);
  }
  if (sent.why.ok() || sent.refused || sent.number == 0) return;
  ++lost_ever_;
  sent.bytes.erase(0, sent.skip);
  lost_bytes_ += sent.bytes.size();
  lost_.emplace(sent.number, AgentLostMessage{std::move(sent.agent), std::move(sent.bytes),
                                              std::move(sent.why)});
  while (lost_.size() > kMostLost || lost_bytes_ > kMaxAgentMessage) {
    lost_bytes_ -= lost_.begin()->second.payload.size();
    lost_.erase(lost_.begin());
  }
}

std::vector<AgentLostMessage> AgentOutbox::take_lost() {
  std::lock_guard lock(mutex_);
  std::vector<AgentLostMessage> out;
  for (auto& [number, message] : lost_) out.push_back(std::move(message));
  lost_.clear();
  lost_bytes_ = 0;
  return out;
}

uint64_t AgentOutbox::lost() const {
  std::lock_guard lock(mutex_);
  return lost_ever_;
}

}  // namespace baton::kvtransfer
