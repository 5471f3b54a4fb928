// What two shm providers tell each other over their socket, as bytes.
#include "transport/shm/message.h"

#include <cstring>

#include "absl/strings/str_format.h"
#include "transport/base/wire.h"

namespace baton::shm {
namespace {
constexpr size_t kMaxText = 256;
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
  base::put_number(out, static_cast<uint8_t>(kind));
  switch (kind) {
    case Kind::kSetup:
      base::put_number(out, control_bytes);
      base::put_number(out, counter_bytes);
      base::put_number(out, connection_bytes);
      base::put_number(out, nonce_address);
      out.append(reinterpret_cast<const char*>(nonce.data()), nonce.size());
      break;
    case Kind::kFile:
      base::put_number(out, file);
      base::put_number(out, file_bytes);
      break;
    case Kind::kDeviceFile:
      base::put_number(out, file);
      base::put_number(out, file_bytes);
      out.append(reinterpret_cast<const char*>(device_uuid.data()), device_uuid.size());
      break;
    case Kind::kDeviceHandle:
      base::put_number(out, file);
      base::put_number(out, file_bytes);
      out.append(reinterpret_cast<const char*>(device_uuid.data()), device_uuid.size());
      for (const uint64_t part : allocation) base::put_number(out, part);
      out.append(reinterpret_cast<const char*>(handle.data()), handle.size());
      break;
    case Kind::kDrop:
      base::put_number(out, file);
      break;
    case Kind::kGoodbye:
      base::put_text(out, std::string_view(text).substr(0, kMaxText));
      break;
    case Kind::kDoorbell:
      break;
  }
  return out;
}

absl::StatusOr<Message> Message::decode(std::string_view packet) {
  base::WireReader in(packet);
  Message message;
  const auto kind = in.number<uint8_t>();
  message.kind = static_cast<Kind>(kind);
  switch (message.kind) {
    case Kind::kSetup: {
      message.control_bytes = in.number<uint64_t>();
      message.counter_bytes = in.number<uint64_t>();
      message.connection_bytes = in.number<uint64_t>();
      message.nonce_address = in.number<uint64_t>();
      const std::string_view nonce = in.take(kNonceBytes);
      if (!nonce.empty()) std::memcpy(message.nonce.data(), nonce.data(), kNonceBytes);
      break;
    }
    case Kind::kFile:
      message.file = in.number<uint64_t>();
      message.file_bytes = in.number<uint64_t>();
      break;
    case Kind::kDeviceFile: {
      message.file = in.number<uint64_t>();
      message.file_bytes = in.number<uint64_t>();
      const std::string_view uuid = in.take(message.device_uuid.size());
      if (!uuid.empty()) std::memcpy(message.device_uuid.data(), uuid.data(), uuid.size());
      break;
    }
    case Kind::kDeviceHandle: {
      message.file = in.number<uint64_t>();
      message.file_bytes = in.number<uint64_t>();
      const std::string_view uuid = in.take(message.device_uuid.size());
      if (!uuid.empty()) std::memcpy(message.device_uuid.data(), uuid.data(), uuid.size());
      for (uint64_t& part : message.allocation) part = in.number<uint64_t>();
      const std::string_view handle = in.take(message.handle.size());
      if (!handle.empty()) std::memcpy(message.handle.data(), handle.data(), handle.size());
      break;
    }
    case Kind::kDrop:
      message.file = in.number<uint64_t>();
      break;
    case Kind::kGoodbye:
      message.text = std::string(in.text(kMaxText));
      break;
    case Kind::kDoorbell:
      break;
    default:
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
