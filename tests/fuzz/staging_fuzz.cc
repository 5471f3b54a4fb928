// Fuzzes what workers say about memory of devices that is staged: what is accepted is bounded, and
// encodes to something that says the same.

#include "tests/std.h"
#include "transport/internal/messages/control_message.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using baton::internal::StagingMessage;
  // A copy of exactly this size: reading past it is then an error that is seen.
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  const auto message = StagingMessage::decode(bytes);
  if (!message.ok()) return 0;
  if (message->runs.size() > StagingMessage::kMaxRuns) std::abort();
  if (message->bytes > StagingMessage::kMaxBytes) std::abort();
  if (message->status.message().size() > StagingMessage::kMaxText) std::abort();
  std::string once, twice;
  message->encode(once);
  const auto again = StagingMessage::decode(once);
  if (!again.ok()) std::abort();
  again->encode(twice);
  if (once != twice) std::abort();
  return 0;
}
