// Encodes the messages of two shm providers on their socket.
#include "transport/shm/message.h"

#include "absl/strings/str_format.h"
#include "transport/base/wire.h"

namespace baton::shm {
namespace {
constexpr size_t kMaxText = 256;

// The fields of a message of this kind, in their order on the wire. False: the kind does not exist.
template <typename Wire, typename T>
bool members(Wire& wire, T& m) {
  wire(m.kind);
  switch (m.kind) {
    case Message::Kind::kSetup:
      wire(m.control_bytes, m.counter_bytes, m.connection_bytes, m.nonce_address, m.nonce);
      return true;
    case Message::Kind::kFile:
      wire(m.file, m.file_bytes);
      return true;
    case Message::Kind::kDeviceFile:
      wire(m.file, m.file_bytes, m.device_uuid);
      return true;
    case Message::Kind::kDeviceHandle:
      wire(m.file, m.file_bytes, m.device_uuid, m.allocation, m.handle);
      return true;
    case Message::Kind::kDrop:
      wire(m.file);
      return true;
    case Message::Kind::kGoodbye:
      wire.text(m.text, kMaxText);
      return true;
    case Message::Kind::kDoorbell:
      return true;
  }
  return false;
}

}  // namespace

size_t Message::expected_fds(bool from_client) const {
  switch (kind) {
    case Kind::kSetup:
      return from_client ? 3 : 2;
    case Kind::kFile:
    case Kind::kDeviceFile:
      return 1;
    default:
      return 0;
  }
}

std::string Message::encode() const {
  std::string out;
  base::WireWriter wire(out);
  members(wire, *this);
  return out;
}

absl::StatusOr<Message> Message::decode(std::string_view packet) {
  base::WireReader in(packet);
  Message message;
  const bool known = members(in, message);
  const auto kind = static_cast<int>(message.kind);
  if (!known) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the peer sent a message of unknown kind %d", kind));
  }
  if (!in.finished()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the peer sent a message of kind %d with %u bytes, which is not its size",
                        kind, packet.size()));
  }
  return message;
}

}  // namespace baton::shm
