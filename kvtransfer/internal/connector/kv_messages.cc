// Encoding and fully checked decoding of what decode and prefill workers tell each other.
#include "kvtransfer/internal/connector/kv_messages.h"

#include <algorithm>
#include <bit>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "transport/base/wire.h"
#include "transport/transfer.h"

namespace baton::kvtransfer {
namespace {

static_assert(std::endian::native == std::endian::little, "the wire is little-endian");

absl::Status invalid(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("KV message: ", what));
}

bool known(KvMessageKind kind) {
  return kind >= KvMessageKind::kRequest && kind <= KvMessageKind::kRenew;
}

size_t body_limit(KvMessageKind kind) {
  return kind == KvMessageKind::kRequest  ? kMaxKvMessage
         : kind == KvMessageKind::kFailed ? kMaxKvFailure
                                          : kMaxKvReply;
}

template <typename T>
void put_array(std::string& out, const std::vector<T>& values) {
  base::put_number(out, static_cast<uint32_t>(values.size()));
  out.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

// The length is checked against the bytes that are there before anything is allocated.
template <typename T>
void take_array(base::WireReader& in, std::vector<T>& values) {
  const size_t count = in.number<uint32_t>();
  const std::string_view raw = in.take(count * sizeof(T));
  values.resize(raw.size() / sizeof(T));
  if (!raw.empty()) std::memcpy(values.data(), raw.data(), raw.size());
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
  if (in.failed() || magic != kKvMagic) return invalid("not one: wrong magic or truncated header");
  part.load = load;
  if (version != kKvVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat("KV message of version ", version, ", this worker speaks version ", kKvVersion,
                     "; install the same release on both workers"));
  }
  part.bytes = notification.substr(kKvHeaderBytes);
  if (!known(part.kind) || zero != 0 || part.load == 0) return invalid("unknown kind or load 0");
  if (part.total > body_limit(part.kind)) {
    return invalid(absl::StrCat(part.total, " bytes, more than ", body_limit(part.kind)));
  }
  if (part.offset % kKvPartBytes != 0 || part.offset > part.total ||
      part.bytes.size() != std::min<size_t>(kKvPartBytes, part.total - part.offset) ||
      (part.bytes.empty() && part.total != 0)) {
    return invalid("a part that is not one of its message");
  }
  return absl::OkStatus();
}

void encode_kv_part(KvMessageKind kind, uint64_t load, std::string_view body, size_t& offset,
                    std::string& out) {
  const std::string_view bytes = body.substr(offset, kKvPartBytes);
  out.clear();
  base::put_number(out, kKvMagic);
  base::put_number(out, kKvVersion);
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
  return invalid(why);
}

absl::StatusOr<bool> KvAssembler::add(const KvMessagePart& part, std::string& body) {
  const Key key(part.load, part.kind);
  auto it = open_.find(key);
  if (it == open_.end()) {
    if (part.bytes.size() == part.total) {  // all of it in one
      body.assign(part.bytes);
      return true;
    }
    if (open_.size() == kMaxOpen) return invalid("too many messages are under way");
    it = open_.try_emplace(key).first;
    it->second.total = part.total;
    it->second.parts.resize((part.total + kKvPartBytes - 1) / kKvPartBytes);
  }
  Partial& partial = it->second;
  if (part.total != partial.total) return refuse(key, "its parts disagree on its length");
  if (held_ + part.bytes.size() > kMaxHeld) return refuse(key, "too many bytes are under way");

  std::string& bytes = partial.parts[part.offset / kKvPartBytes];
  if (!bytes.empty()) return refuse(key, "a part came twice");
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

KvTokens kept_tokens(const KvGroup& group, uint64_t first_token, uint64_t length) {
  const uint64_t window = group.window == 0 ? length : group.window;
  return {std::max(first_token, length > window ? length - window : 0), length};
}

KvBlockRange blocks_of(const KvGroup& group, KvTokens tokens) {
  if (tokens.empty()) return {};
  const uint64_t first = tokens.begin / group.block_tokens;
  return {first, (tokens.end - 1) / group.block_tokens + 1 - first};
}

KvPages KvLoadRequest::pages(size_t wanted) const {
  size_t at = 0;
  for (size_t g = 0;; ++g) {
    const KvGroup& group = layout.groups[g];
    const KvBlockRange range = blocks_of(group, kept_tokens(group, first_token, tokens.size()));
    if (g == wanted) return {range.first, absl::MakeConstSpan(blocks).subspan(at, range.count)};
    at += range.count;
  }
}

absl::Status check_kv_request(const KvLoadRequest& request) {
  if (absl::Status status = request.layout.check(); !status.ok()) return status;
  const KvLayout& layout = request.layout;
  if (request.decode.size() > KvLoadRequest::kMaxName) return invalid("the name is too long");
  if (request.timeout <= Time::zero() || request.timeout > KvLoadRequest::kMaxTimeout) {
    return invalid("the timeout must be more than nothing and at most a day");
  }
  if (request.key.size() > KvLoadRequest::kMaxKey) return invalid("the key is too long");
  const KvShare& share = request.share;
  if (share.ranks == 0 || share.ranks > KvLoadRequest::kMaxRanks || share.rank >= share.ranks) {
    return invalid(absl::StrCat("rank ", share.rank, " of ", share.ranks, " prefill workers"));
  }
  if (request.loads_of_key == 0 || request.loads_of_key > KvLoadRequest::kMaxRanks) {
    return invalid(absl::StrCat(request.loads_of_key, " loads of one key"));
  }
  if (request.first_token >= request.tokens.size()) return invalid("no token is asked for");
  size_t wanted = 0;
  for (const KvGroup& group : layout.groups) {
    if (request.first_token % group.block_tokens != 0) {
      return invalid(absl::StrCat("first_token ", request.first_token,
                                  " is not a multiple of the block size ", group.block_tokens));
    }
    const auto count =
        blocks_of(group, kept_tokens(group, request.first_token, request.tokens.size())).count;
    if (count > request.blocks.size() - wanted) {
      return invalid(
          absl::StrCat("only ", request.blocks.size(), " blocks for KV that fills more"));
    }
    for (uint32_t block : absl::MakeConstSpan(request.blocks).subspan(wanted, count)) {
      if (block < group.blocks) continue;
      return invalid(
          absl::StrCat("block ", block, " of a cache that has ", group.blocks, " blocks"));
    }
    wanted += count;
  }
  if (request.blocks.size() != wanted) {
    return invalid(absl::StrCat(request.blocks.size(), " blocks for KV that fills ", wanted));
  }
  if (request.buffers.size() != layout.buffers.size()) return invalid("not one region per buffer");
  const WorkerUid& owner = request.buffers.front().region.owner;
  for (size_t i = 0; i < request.buffers.size(); ++i) {
    const KvRemoteBuffer& buffer = request.buffers[i];
    if (buffer.region.owner != owner) return invalid("a region of somebody else");
    if (!allows(buffer.region.access, Access::kRemoteWrite)) {
      return invalid("the cache's region may not be written by peers");
    }
    if (buffer.offset > buffer.region.size ||
        layout.buffers[i].bytes > buffer.region.size - buffer.offset) {
      return invalid("the cache does not fit its region");
    }
  }
  if (request.counters.size() != layout.layers()) return invalid("not one counter per layer");
  for (const RemoteCounter& counter : request.counters) {
    if (counter.generation == 0) return invalid("a counter that does not exist");
    if (counter.owner != owner) return invalid("a counter of somebody else");
  }
  return absl::OkStatus();
}

absl::Status encode_kv_request(const KvLoadRequest& request, std::string& body) {
  if (absl::Status status = check_kv_request(request); !status.ok()) return status;
  body.clear();
  base::put_number(body, request.request);
  base::put_text(body, request.decode);
  base::put_text(body, request.key);
  base::put_number(body, request.loads_of_key);
  base::put_number(body, request.share.ranks);
  base::put_number(body, request.share.rank);
  base::put_number(body, request.share.turn);
  base::put_number(body, int64_t{request.timeout.count()});
  base::put_number(body, request.first_token);
  const std::string layout = request.layout.encode();
  base::put_number(body, static_cast<uint32_t>(layout.size()));
  body.append(layout);
  for (const KvRemoteBuffer& buffer : request.buffers) {
    body.append(buffer.region.encode());
    base::put_number(body, buffer.offset);
  }
  base::put_number(body, static_cast<uint32_t>(request.counters.size()));
  for (const RemoteCounter& counter : request.counters) {
    base::put_number(body, counter.index);
    base::put_number(body, counter.generation);
  }
  put_array(body, request.blocks);
  put_array(body, request.tokens);
  if (body.size() > kMaxKvMessage) {
    return invalid(absl::StrCat("a request of ", request.tokens.size(), " tokens takes ",
                                body.size(), " bytes, more than ", kMaxKvMessage));
  }
  return absl::OkStatus();
}

absl::Status decode_kv_request(std::string_view body, KvLoadRequest& request) {
  base::WireReader in(body);
  request.request = in.number<uint64_t>();
  request.decode = in.text(KvLoadRequest::kMaxName);
  request.key = in.text(KvLoadRequest::kMaxKey);
  request.loads_of_key = in.number<uint32_t>();
  request.share.ranks = in.number<uint32_t>();
  request.share.rank = in.number<uint32_t>();
  request.share.turn = in.number<uint64_t>();
  request.timeout = Time(in.number<int64_t>());
  request.first_token = in.number<uint32_t>();
  const std::string_view layout = in.take(in.number<uint32_t>());
  if (in.failed()) return invalid("truncated request");
  absl::StatusOr<KvLayout> decoded_layout = KvLayout::decode(layout);
  if (!decoded_layout.ok()) return decoded_layout.status();
  request.layout = *std::move(decoded_layout);
  request.buffers.resize(request.layout.buffers.size());
  for (KvRemoteBuffer& buffer : request.buffers) {
    const std::string_view region = in.take(RemoteRegion::kEncodedBytes);
    buffer.offset = in.number<uint64_t>();
    if (in.failed()) return invalid("truncated request");
    absl::StatusOr<RemoteRegion> decoded = RemoteRegion::decode(region);
    if (!decoded.ok()) return decoded.status();
    buffer.region = *decoded;
  }

  const auto counters = in.number<uint32_t>();
  if (counters != request.layout.layers()) return invalid("not one counter per layer");
  request.counters.resize(counters);  // at most KvLayout::kMaxLayers
  for (RemoteCounter& counter : request.counters) {
    counter.owner = request.buffers.front().region.owner;
    counter.index = in.number<uint32_t>();
    counter.generation = in.number<uint16_t>();
  }
  take_array(in, request.blocks);
  take_array(in, request.tokens);
  if (!in.finished()) return invalid("truncated or overlong request");
  return check_kv_request(request);
}

std::string encode_kv_failure(const absl::Status& why, std::string_view arrived) {
  std::string body;
  base::put_number(body, static_cast<int32_t>(why.code()));
  const absl::string_view text = why.message().substr(0, kMaxKvReply - 8);
  base::put_text(body, {text.data(), text.size()});
  if (arrived.size() <= kMaxKvFailure - kMaxKvReply) body.append(arrived);
  return body;
}

absl::Status decode_kv_failure(std::string_view body, std::string* arrived) {
  base::WireReader in(body);
  const auto code = in.number<int32_t>();
  const std::string_view text = in.text(kMaxKvReply);
  if (in.failed() || code <= 0 || code > static_cast<int>(absl::StatusCode::kUnauthenticated)) {
    return invalid("a failure that does not say what failed");
  }
  if (arrived != nullptr) *arrived = body.substr(sizeof code + sizeof(uint16_t) + text.size());
  return absl::Status(static_cast<absl::StatusCode>(code), {text.data(), text.size()});
}

std::string encode_kv_renewal(Time timeout) {
  std::string body;
  base::put_number(body, int64_t{timeout.count()});
  return body;
}

absl::StatusOr<Time> decode_kv_renewal(std::string_view body) {
  base::WireReader in(body);
  const Time timeout(in.number<int64_t>());
  if (!in.finished() || timeout <= Time::zero() || timeout > KvLoadRequest::kMaxTimeout) {
    return invalid("a renewal for no time that a load may take");
  }
  return timeout;
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
