// Encodes what workers say about their rails, and decodes it strictly.
#include "transport/internal/messages/control_message.h"

#include "transport/base/wire.h"

namespace baton::internal {

std::string ControlMessage::encode() const {
  std::string out;
  base::put_number(out, static_cast<uint8_t>(kind));
  base::put_number(out, link);
  if (kind == Kind::kFence) {
    base::put_number(out, static_cast<uint32_t>(slices.size()));
    for (const SliceName& name : slices) {
      base::put_number(out, name.transfer.slot);
      base::put_number(out, name.transfer.generation);
      base::put_number(out, name.slice);
    }
  } else {
    base::put_number(out, static_cast<uint32_t>(landed.size()));
    for (const Fate each : landed) base::put_number(out, static_cast<uint8_t>(each));
  }
  return out;
}

absl::StatusOr<ControlMessage> ControlMessage::decode(std::string_view bytes) {
  base::WireReader in(bytes);
  ControlMessage message;
  const uint8_t kind = in.number<uint8_t>();
  message.kind = static_cast<Kind>(kind);
  message.link = in.number<uint64_t>();
  const uint32_t count = in.number<uint32_t>();
  bool good =
      message.kind == Kind::kPart
          ? message.link == 0 && count == 0
          : (message.kind == Kind::kFence || message.kind == Kind::kFenced) && count <= kMaxSlices;
  for (uint32_t i = 0; good && i < count; ++i) {
    if (message.kind == Kind::kFence) {
      SliceName& name = message.slices.emplace_back();
      name.transfer.slot = in.number<uint32_t>();
      name.transfer.generation = in.number<uint32_t>();
      name.slice = in.number<uint32_t>();
    } else {
      const uint8_t landed = in.number<uint8_t>();
      message.landed.push_back(static_cast<Fate>(landed));
      good = landed <= static_cast<uint8_t>(Fate::kUnknown);
    }
    good = good && !in.failed();
  }
  if (good && in.finished()) return message;
  return absl::InvalidArgumentError("the peer sent a malformed message about its rails");
}

}  // namespace baton::internal
