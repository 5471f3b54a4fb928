// Encodes what workers say about their rails, and decodes it strictly.
#include "transport/internal/messages/control_message.h"

#include "transport/base/wire.h"

namespace baton::internal {

std::string ControlMessage::encode() const {
  std::string out;
  base::WireWriter wire(out);
  wire(kind, link, static_cast<uint32_t>(kind == Kind::kFence ? slices.size() : landed.size()));
  if (kind == Kind::kFence) {
    for (const SliceName& name : slices) wire(name);
  } else {
    for (const Fate each : landed) wire(each);
  }
  return out;
}

absl::StatusOr<ControlMessage> ControlMessage::decode(std::string_view bytes) {
  base::WireReader in(bytes);
  ControlMessage message;
  in(message.kind, message.link);
  const uint32_t count = in.number<uint32_t>();
  bool good =
      message.kind == Kind::kPart
          ? message.link == 0 && count == 0
          : (message.kind == Kind::kFence || message.kind == Kind::kFenced) && count <= kMaxSlices;
  for (uint32_t i = 0; good && i < count; ++i) {
    if (message.kind == Kind::kFence) {
      in(message.slices.emplace_back());
    } else {
      in(message.landed.emplace_back());
      good = message.landed.back() <= Fate::kUnknown;
    }
    good = good && !in.failed();
  }
  if (good && in.finished()) return message;
  return absl::InvalidArgumentError("the peer sent a malformed message about its rails");
}

void StagingMessage::encode(std::string& out) const {
  out.clear();
  base::WireWriter wire(out);
  wire(kind, chunk, room);
  if (kind == Kind::kEnded) {
    const std::string text(status.message().substr(0, kMaxText));
    wire(static_cast<uint32_t>(status.code()), static_cast<uint32_t>(text.size()));
    out += text;
    return;
  }
  if (kind == Kind::kRelease || kind == Kind::kBorrows) return;
  out += region.encode();
  if (kind == Kind::kRing) return;
  wire(offset, bytes, urgent, static_cast<uint32_t>(runs.size()));
  for (const Run& run : runs) wire(run);
}

absl::StatusOr<StagingMessage> StagingMessage::decode(std::string_view text) {
  const absl::Status malformed =
      absl::InvalidArgumentError("the peer sent a malformed message about staged memory");
  base::WireReader in(text);
  StagingMessage message;
  in(message.kind, message.chunk, message.room);
  if (message.kind < Kind::kWant || message.kind > Kind::kOffer) return malformed;
  if (message.kind == Kind::kEnded) {
    const uint32_t code = in.number<uint32_t>();
    const uint32_t size = in.number<uint32_t>();
    if (size > kMaxText || code > static_cast<uint32_t>(absl::StatusCode::kUnauthenticated)) {
      return malformed;
    }
    message.status = absl::Status(static_cast<absl::StatusCode>(code), std::string(in.take(size)));
  } else if (message.kind != Kind::kRelease && message.kind != Kind::kBorrows) {
    absl::StatusOr<RemoteRegion> region =
        RemoteRegion::decode(in.take(RemoteRegion::kEncodedBytes));
    if (!region.ok()) return malformed;
    message.region = *region;
    if (message.kind == Kind::kRing) {
      if (!in.finished()) return malformed;
      return message;
    }
    in(message.offset, message.bytes, message.urgent);
    const uint32_t count = in.number<uint32_t>();
    if (message.bytes == 0 || message.bytes > kMaxBytes || count > kMaxRuns) return malformed;
    uint64_t sum = 0;
    for (uint32_t i = 0; i < count && !in.failed(); ++i) {
      Run& run = message.runs.emplace_back();
      in(run);
      if (run.bytes == 0 || run.bytes > kMaxBytes) return malformed;
      sum += run.bytes;
    }
    const bool with_runs =
        message.kind == Kind::kFetch || message.kind == Kind::kLand || message.kind == Kind::kOffer;
    if (sum != (with_runs ? message.bytes : 0)) return malformed;
  }
  if (!in.finished()) return malformed;
  return message;
}

}  // namespace baton::internal
