// Frames of agents: one byte of kind, or kind, number and place of a part.
#include "kvtransfer/internal/agent_messages.h"

#include <algorithm>
#include <atomic>

#include "absl/strings/str_format.h"
#include "kvtransfer/agent.h"
#include "transport/base/wire.h"

namespace baton::kvtransfer {
namespace {

constexpr uint8_t kPart = 0x80;  // beside the kind: one of several
static_assert(kMaxWholeAgentMessage + 32 <= kMaxNotification);

constexpr size_t kMostParts =
    (kMaxAgentMessage + kMaxWholeAgentMessage - 1) / kMaxWholeAgentMessage;

size_t part_bytes(size_t total, size_t part) {
  return std::min(kMaxWholeAgentMessage, total - part * kMaxWholeAgentMessage);
}

absl::Status strange() { return absl::InvalidArgumentError("a malformed notification"); }

// The number of a message that travels in parts.
uint64_t next_number() {
  static std::atomic<uint64_t> messages{0};
  return ++messages;
}

}  // namespace

std::string agent_frame(AgentFrameKind kind, std::string_view payload) {
  std::string out(1, static_cast<char>(kind));
  out.append(payload);
  return out;
}

std::string abandon_frame(std::string_view part, size_t parts) {
  std::string out(1, static_cast<char>(AgentFrameKind::kAbandon));
  out.append(part.substr(1, sizeof(uint64_t)));
  base::put_number(out, static_cast<uint32_t>(parts));
  return out;
}

std::vector<std::string> agent_frames(AgentFrameKind kind, std::string_view payload) {
  if (payload.size() <= kMaxWholeAgentMessage) return {agent_frame(kind, payload)};
  const uint64_t number = next_number();
  std::vector<std::string> out;
  for (size_t part = 0; part * kMaxWholeAgentMessage < payload.size(); ++part) {
    std::string& frame = out.emplace_back(1, static_cast<char>(static_cast<uint8_t>(kind) | kPart));
    base::put_number(frame, number);
    base::put_number(frame, static_cast<uint32_t>(payload.size()));
    base::put_number(frame, static_cast<uint32_t>(part));
    frame.append(payload.substr(part * kMaxWholeAgentMessage, kMaxWholeAgentMessage));
  }
  return out;
}

void number_anew(std::vector<std::string>& frames) {
  if (frames.size() < 2) return;
  std::string number;
  base::put_number(number, next_number());
  for (std::string& frame : frames) frame.replace(1, number.size(), number);
}

absl::StatusOr<bool> AgentAssembler::add(std::string_view frame, AgentFrame& out) {
  if (frame.empty()) return strange();
  const auto first = static_cast<uint8_t>(frame.front());
  const uint8_t kind = first & ~kPart;
  if (kind > static_cast<uint8_t>(AgentFrameKind::kAbandon)) return strange();
  frame.remove_prefix(1);
  if (first == static_cast<uint8_t>(AgentFrameKind::kAbandon)) return abandon(frame);
  if ((first & kPart) == 0) {
    out.kind = static_cast<AgentFrameKind>(kind);
    out.payload.assign(frame);
    return true;
  }
  base::WireReader in(frame);
  const auto number = in.number<uint64_t>();
  const auto total = in.number<uint32_t>();
  const auto part = in.number<uint32_t>();
  const size_t parts = (size_t{total} + kMaxWholeAgentMessage - 1) / kMaxWholeAgentMessage;
  if (total <= kMaxWholeAgentMessage || total > kMaxAgentMessage || part >= parts) {
    return strange();
  }
  const std::string_view bytes = in.take(part_bytes(total, part));
  if (!in.finished()) return strange();
  const auto [at, made] = open_.try_emplace(number);
  Open& open = at->second;
  if (open.abandoned) {
    drop_part(number, open);
    return false;
  }
  if (made) {
    if (held_ + total > kMaxHeld) {
      open_.erase(at);
      return absl::ResourceExhaustedError(
          absl::StrFormat("more than %u bytes of incomplete messages", kMaxHeld));
    }
    held_ += total;
    open = {static_cast<AgentFrameKind>(kind), std::string(total, '\0'),
            std::vector<bool>(parts, false), parts};
  }
  if (open.payload.size() != total || static_cast<uint8_t>(open.kind) != kind || open.seen[part]) {
    return strange();
  }
  open.seen[part] = true;
  std::copy(bytes.begin(), bytes.end(),
            open.payload.begin() + static_cast<ptrdiff_t>(part * kMaxWholeAgentMessage));
  if (--open.missing > 0) return false;
  out.kind = open.kind;
  out.payload = std::move(open.payload);
  held_ -= total;
  open_.erase(at);
  return true;
}

// Parts may come behind the word that there are no more than these.
absl::StatusOr<bool> AgentAssembler::abandon(std::string_view what) {
  base::WireReader in(what);
  const auto number = in.number<uint64_t>();
  const auto parts = in.number<uint32_t>();
  if (!in.finished() || parts > kMostParts) return strange();
  const auto known = open_.find(number);
  if (parts == 0) {
    if (known == open_.end()) return false;
    held_ -= known->second.payload.size();
    abandoned_ -= known->second.abandoned;
    open_.erase(known);
    return false;
  }
  size_t seen = 0;
  if (known != open_.end()) {
    seen = known->second.seen.size() - known->second.missing;
    if (known->second.abandoned || seen > parts) return strange();
    held_ -= known->second.payload.size();
    open_.erase(known);
  }
  if (seen == parts) return false;
  if (abandoned_ == kMaxAbandoned) return strange();
  ++abandoned_;
  open_[number] = {.missing = parts - seen, .abandoned = true};
  return false;
}

void AgentAssembler::drop_part(uint64_t number, Open& open) {
  if (--open.missing > 0) return;
  --abandoned_;
  open_.erase(number);
}

}  // namespace baton::kvtransfer
