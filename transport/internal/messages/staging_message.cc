// Encodes what workers say about staged chunks, and decodes it strictly.
#include "transport/internal/messages/staging_message.h"

#include "transport/base/wire.h"

namespace baton::internal {
namespace {

Handle take_handle(base::WireReader& in) {
  Handle handle;
  handle.index = in.number<uint32_t>();
  handle.generation = in.number<uint32_t>();
  return handle;
}

}  // namespace

void StagingMessage::encode(std::string& out) const {
  out.clear();
  base::put_number(out, static_cast<uint8_t>(kind));
  for (const Handle& handle : {chunk, room}) {
    base::put_number(out, handle.index);
    base::put_number(out, handle.generation);
  }
  if (kind == Kind::kEnded) {
    const std::string text(status.message().substr(0, kMaxText));
    base::put_number(out, static_cast<uint32_t>(status.code()));
    base::put_number(out, static_cast<uint32_t>(text.size()));
    out += text;
    return;
  }
  if (kind == Kind::kRelease || kind == Kind::kBorrows) return;
  out += region.encode();
  if (kind == Kind::kRing) return;
  base::put_number(out, offset);
  base::put_number(out, bytes);
  base::put_number(out, static_cast<uint8_t>(urgent));
  base::put_number(out, static_cast<uint32_t>(runs.size()));
  for (const Run& run : runs) {
    base::put_number(out, run.offset);
    base::put_number(out, run.bytes);
  }
}

absl::StatusOr<StagingMessage> StagingMessage::decode(std::string_view text) {
  const absl::Status malformed =
      absl::InvalidArgumentError("the peer sent a malformed message about staged memory");
  base::WireReader in(text);
  StagingMessage message;
  const uint8_t kind = in.number<uint8_t>();
  if (kind < static_cast<uint8_t>(Kind::kWant) || kind > static_cast<uint8_t>(Kind::kOffer)) {
    return malformed;
  }
  message.kind = static_cast<Kind>(kind);
  message.chunk = take_handle(in);
  message.room = take_handle(in);
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
    message.offset = in.number<uint64_t>();
    message.bytes = in.number<uint64_t>();
    message.urgent = in.number<uint8_t>() != 0;
    const uint32_t count = in.number<uint32_t>();
    if (message.bytes == 0 || message.bytes > kMaxBytes || count > kMaxRuns) return malformed;
    uint64_t sum = 0;
    for (uint32_t i = 0; i < count && !in.failed(); ++i) {
      Run& run = message.runs.emplace_back();
      run.offset = in.number<uint64_t>();
      run.bytes = in.number<uint64_t>();
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
