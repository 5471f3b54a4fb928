// Fuzzes what workers say about their rails: what is accepted is bounded, and encodes to the same
// bytes.

#include "tests/std.h"
#include "transport/internal/messages/control_message.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using baton::internal::ControlMessage;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const auto message = ControlMessage::decode(bytes);
  if (!message.ok()) return 0;
  if (message->slices.size() > ControlMessage::kMaxSlices) std::abort();
  if (message->landed.size() > ControlMessage::kMaxSlices) std::abort();
  if (message->encode() != bytes) std::abort();
  return 0;
}
