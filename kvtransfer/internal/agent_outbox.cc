// An agent's messages go out as notifications, each in one frame or in several.
#include "kvtransfer/internal/agent_outbox.h"

#include <chrono>
#include <memory>
#include <utility>

namespace baton::kvtransfer {

absl::Status AgentOutbox::send_message(std::string_view agent, PeerId peer,
                                       std::string_view message) {
  Sent* const sent = new Sent{.outbox = *this, .agent = std::string(agent), .number = ++messages_};
  if (message.size() <= kMaxWholeAgentMessage) {
    sent->bytes = agent_frame(AgentFrameKind::kMessage, message);
    sent->skip = sent->bytes.size() - message.size();
    sent->open = 1;
    return submit_all(peer, absl::MakeConstSpan(&sent->bytes, 1), sent);
  }
  const std::vector<std::string> frames = agent_frames(AgentFrameKind::kMessage, message);
  sent->bytes = message;
  sent->open = frames.size();
  return submit_all(peer, frames, sent);
}

absl::Status AgentOutbox::send(PeerId peer, AgentFrameKind kind, std::string_view payload) {
  return submit_all(peer, agent_frames(kind, payload), nullptr);
}

absl::Status AgentOutbox::submit(PeerId peer, std::string_view frame, Sent* sent) {
  TransferRequest request{.op = Op::kWrite, .peer = peer, .notify = frame, .detached = true};
  if (sent != nullptr) {
    request.on_end = &AgentOutbox::on_end;
    request.context = sent;
  }
  return worker_.submit(request).status();
}

absl::Status AgentOutbox::submit_all(PeerId peer, absl::Span<const std::string> frames,
                                     Sent* sent) {
  for (size_t i = 0; i < frames.size(); ++i) {
    absl::Status status = submit(peer, frames[i], sent);
    // Once begun, a message is worth waiting for.
    if (absl::IsResourceExhausted(status) && i > 0) {
      worker_
          .wait_until(
              [&] {
                status = submit(peer, frames[i], sent);
                return !absl::IsResourceExhausted(status);
              },
              std::chrono::seconds(10))
          .IgnoreError();
    }
    if (!status.ok()) {
      if (sent != nullptr) ended(*sent, frames.size() - i, status, true);
      return status;
    }
  }
  return absl::OkStatus();
}

void AgentOutbox::on_end(void* context, TransferId /*id*/, const absl::Status& status) {
  auto& sent = *static_cast<Sent*>(context);
  sent.outbox.ended(sent, 1, status, false);
}

void AgentOutbox::ended(Sent& sent, size_t frames, const absl::Status& status, bool refused) {
  std::unique_ptr<Sent> last;  // freed after the lock
  std::lock_guard lock(mutex_);
  if (sent.why.ok()) sent.why = status;
  sent.refused |= refused;
  sent.open -= frames;
  if (sent.open > 0) return;
  last.reset(&sent);
  if (sent.why.ok() || sent.refused) return;
  ++lost_ever_;
  sent.bytes.erase(0, sent.skip);
  lost_bytes_ += sent.bytes.size();
  lost_.emplace(sent.number, AgentLostMessage{std::move(sent.agent), std::move(sent.bytes),
                                              std::move(sent.why)});
  while (lost_.size() > kMostLost || (lost_.size() > 1 && lost_bytes_ > kMaxAgentMessage)) {
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
