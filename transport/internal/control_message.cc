// Encodes what workers say about their rails, and decodes it strictly.
#include "transport/internal/control_message.h"

#include "transport/base/wire.h"

namespace baton::internal {

std::string ControlMessage::encode() const {
  std::string out;
  put_number(out, static_cast<uint8_t>(kind));
  switch (kind) {
    case Kind::kAddress:
      put_text(out, require);
      put_text(out, address);
      break;
    case Kind::kFence:
      put_number(out, link);
      put_number(out, static_cast<uint32_t>(slices.size()));
      for (const SliceName& name : slices) {
        put_number(out, name.transfer.slot);
        put_number(out, name.transfer.generation);
        put_number(out, name.slice);
      }
      break;
    case Kind::kFenced:
      put_number(out, link);
      put_number(out, static_cast<uint32_t>(landed.size()));
      for (const bool each : landed) put_number(out, static_cast<uint8_t>(each));
      break;
  }
  return out;
}

absl::StatusOr<ControlMessage> ControlMessage::decode(std::string_view bytes) {
  const auto malformed = [] {
    return absl::InvalidArgumentError("the peer sent a malformed message about its rails");
  };
  WireReader in(bytes);
  ControlMessage message;
  const uint8_t kind = in.number<uint8_t>();
  message.kind = static_cast<Kind>(kind);
  uint32_t count = 0;
  switch (message.kind) {
    case Kind::kAddress:
      message.require = in.text(64);
      message.address = in.text(kMaxAddress);
      break;
    case Kind::kFence:
      message.link = in.number<uint64_t>();
      count = in.number<uint32_t>();
      if (count > kMaxSlices) return malformed();
      message.slices.reserve(count);
      for (uint32_t i = 0; i < count; ++i) {
        SliceName name;
        name.transfer.slot = in.number<uint32_t>();
        name.transfer.generation = in.number<uint32_t>();
        name.slice = in.number<uint32_t>();
        message.slices.push_back(name);
      }
      break;
    case Kind::kFenced:
      message.link = in.number<uint64_t>();
      count = in.number<uint32_t>();
      if (count > kMaxSlices) return malformed();
      message.landed.reserve(count);
      for (uint32_t i = 0; i < count; ++i) {
        const uint8_t landed = in.number<uint8_t>();
        if (landed > 1) return malformed();
        message.landed.push_back(landed == 1);
      }
      break;
    default:
      return malformed();
  }
  if (!in.finished()) return malformed();
  return message;
}

}  // namespace baton::internal
