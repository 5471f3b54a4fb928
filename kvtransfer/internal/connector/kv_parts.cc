// Notifications as parts of messages, put together again; which loads have been heard of.
#include <algorithm>
#include <string>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "kvtransfer/internal/connector/kv_messages.h"
#include "transport/base/wire.h"

namespace baton::kvtransfer {
namespace {

absl::Status bad_part(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("KV message: ", what));
}

bool known(KvMessageKind kind, uint16_t version) {
  if (kind == KvMessageKind::kRequest) return true;
  return kind > KvMessageKind::kRequest && kind <= kLastKvMessageKind &&
         kv_version_of(kind) == version;
}

size_t body_limit(KvMessageKind kind) {
  switch (kind) {
    case KvMessageKind::kRequest:
      return kMaxKvMessage;
    case KvMessageKind::kReady:
      return kKvPartBytes;
    case KvMessageKind::kOffer:
      return kMaxKvOffer;
    case KvMessageKind::kFailed:
      return kMaxKvFailure;
    default:
      return kMaxKvReply;
  }
}

}  // namespace

absl::Status decode_kv_part(std::string_view notification, KvMessagePart& part) {
  part = KvMessagePart();
  base::WireReader in(notification);
  const auto magic = in.number<uint32_t>();
  const auto version = in.number<uint16_t>();
  part.kind = static_cast<KvMessageKind>(in.number<uint8_t>());
  const auto zero = in.number<uint8_t>();
  const auto load = in.number<uint64_t>();
  part.total = in.number<uint32_t>();
  part.offset = in.number<uint32_t>();
  if (in.failed() || magic != kKvMagic)
    return bad_part("not a KV message: wrong magic or truncated header");
  part.load = load;
  if (version != kKvVersion && version != kKvPullVersion) {
    return absl::FailedPreconditionError(absl::StrCat(
        "KV message of version ", version, ", this worker speaks versions ", kKvVersion, " and ",
        kKvPullVersion, "; install the same release on both workers"));
  }
  part.version = version;
  part.bytes = notification.substr(kKvHeaderBytes);
  if (!known(part.kind, version) || zero != 0 || part.load == 0)
    return bad_part("unknown kind or load 0");
  if (part.total > body_limit(part.kind)) {
    return bad_part(absl::StrCat(part.total, " bytes, more than ", body_limit(part.kind)));
  }
  if (part.offset % kKvPartBytes != 0 || part.offset > part.total ||
      part.bytes.size() != std::min<size_t>(kKvPartBytes, part.total - part.offset) ||
      (part.bytes.empty() && part.total != 0)) {
    return bad_part("a part that does not belong to its message");
  }
  return absl::OkStatus();
}

void encode_kv_part(KvMessageKind kind, uint64_t load, std::string_view body, size_t& offset,
                    std::string& out, uint16_t version) {
  const std::string_view bytes = body.substr(offset, kKvPartBytes);
  out.clear();
  base::put_number(out, kKvMagic);
  base::put_number(out, version);
  base::put_number(out, static_cast<uint8_t>(kind));
  base::put_number(out, uint8_t{0});
  base::put_number(out, load);
  base::put_number(out, static_cast<uint32_t>(body.size()));
  base::put_number(out, static_cast<uint32_t>(offset));
  out.append(bytes);
  offset += bytes.size();
}

absl::Status KvAssembler::refuse(const Key& key, absl::string_view why) {
  if (auto it = open_.find(key); it != open_.end()) {
    held_ -= it->second.received;
    open_.erase(it);
  }
  return bad_part(why);
}

absl::StatusOr<bool> KvAssembler::add(const KvMessagePart& part, std::string& body) {
  const Key key(part.load, part.kind);
  auto it = open_.find(key);
  if (it == open_.end()) {
    if (part.bytes.size() == part.total) {  // all of it in one
      body.assign(part.bytes);
      return true;
    }
    if (open_.size() == kMaxOpen) return bad_part("too many messages are incomplete");
    it = open_.try_emplace(key).first;
    it->second.total = part.total;
    it->second.parts.resize((part.total + kKvPartBytes - 1) / kKvPartBytes);
  }
  Partial& partial = it->second;
  if (part.total != partial.total) return refuse(key, "its parts disagree on its length");
  if (held_ + part.bytes.size() > kMaxHeld)
    return refuse(key, "too many bytes of messages are incomplete");

  std::string& bytes = partial.parts[part.offset / kKvPartBytes];
  if (!bytes.empty()) return refuse(key, "a part arrived twice");
  bytes.assign(part.bytes);
  partial.received += part.bytes.size();
  held_ += part.bytes.size();
  if (partial.received < partial.total) return false;

  body.clear();
  body.reserve(partial.total);
  for (const std::string& each : partial.parts) body.append(each);
  held_ -= partial.received;
  open_.erase(it);
  return true;
}

absl::StatusOr<bool> KvSeenLoads::add(uint64_t load) {
  if (load < all_below_ || ahead_.contains(load)) return false;
  if (load != all_below_ && ahead_.size() == kMaxAhead) {
    return absl::ResourceExhaustedError("too many loads of this peer came out of order");
  }
  ahead_.insert(load);
  while (ahead_.erase(all_below_) != 0) ++all_below_;
  return true;
}

}  // namespace baton::kvtransfer
