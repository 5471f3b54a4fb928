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

}  // namespace baton::internal
