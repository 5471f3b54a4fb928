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

absl::Status check_lease(Time lease) {
  if (lease > Time::zero() && lease <= KvLoadRequest::kMaxTimeout) return absl::OkStatus();
  return invalid("a lease must be more than nothing and at most a day");
}

// That the regions hold the layout's buffers, are all of one owner and allow what is to be done.
absl::Status check_buffers(const KvLayout& layout, const std::vector<KvRemoteBuffer>& buffers,
                           Access access, absl::string_view forbidden) {
  if (buffers.size() != layout.buffers.size())
    return invalid("the number of regions differs from the number of buffers");
  const WorkerUid& owner = buffers.front().region.owner;
  for (size_t i = 0; i < buffers.size(); ++i) {
    const KvRemoteBuffer& buffer = buffers[i];
    if (buffer.region.owner != owner) return invalid("a region of another worker");
    if (!allows(buffer.region.access, access)) return invalid(forbidden);
    if (buffer.offset > buffer.region.size ||
        layout.buffers[i].bytes > buffer.region.size - buffer.offset) {
      return invalid("the cache does not fit its region");
    }
  }
  return absl::OkStatus();
}

void put_cache(std::string& out, const KvLayout& layout,
               const std::vector<KvRemoteBuffer>& buffers) {
  const std::string encoded = layout.encode();
  base::put_number(out, static_cast<uint32_t>(encoded.size()));
  out.append(encoded);
  for (const KvRemoteBuffer& buffer : buffers) {
    out.append(buffer.region.encode());
    base::put_number(out, buffer.offset);
  }
}

// `with_buffers`: a region for each buffer of the layout follows it.
absl::Status take_cache(base::WireReader& in, KvLayout& layout,
                        std::vector<KvRemoteBuffer>& buffers, bool with_buffers) {
  const std::string_view encoded = in.take(in.number<uint32_t>());
  if (in.failed()) return invalid("truncated layout");
  absl::StatusOr<KvLayout> decoded_layout = KvLayout::decode(encoded);
  if (!decoded_layout.ok()) return decoded_layout.status();
  layout = *std::move(decoded_layout);
  buffers.resize(with_buffers ? layout.buffers.size() : 0);
  for (KvRemoteBuffer& buffer : buffers) {
    const std::string_view region = in.take(RemoteRegion::kEncodedBytes);
    buffer.offset = in.number<uint64_t>();
    if (in.failed()) return invalid("truncated list of regions");
    absl::StatusOr<RemoteRegion> decoded = RemoteRegion::decode(region);
    if (!decoded.ok()) return decoded.status();
    buffer.region = *decoded;
  }
  return absl::OkStatus();
}

template <typename T>
void put_array(std::string& out, absl::Span<const T> values) {
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
  if (request.first_token >= request.tokens.size()) return invalid("no tokens are requested");
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
  if (request.pull) {
    if (!request.buffers.empty() || !request.counters.empty()) {
      return invalid("a load that pulls cannot also name a region to be written");
    }
    return check_lease(request.lease);
  }
  if (absl::Status status = check_buffers(layout, request.buffers, Access::kRemoteWrite,
                                          "peers may not write to the cache's region");
      !status.ok()) {
    return status;
  }
  const WorkerUid& owner = request.buffers.front().region.owner;
  if (request.counters.size() != layout.layers())
    return invalid("the number of counters differs from the number of layers");
  for (const RemoteCounter& counter : request.counters) {
    if (counter.generation == 0) return invalid("a counter that does not exist");
    if (counter.owner != owner) return invalid("a counter of another worker");
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
  if (request.pull) base::put_number(body, int64_t{request.lease.count()});
  base::put_number(body, request.first_token);
  put_cache(body, request.layout, request.buffers);
  base::put_number(body, static_cast<uint32_t>(request.counters.size()));
  for (const RemoteCounter& counter : request.counters) {
    base::put_number(body, counter.index);
    base::put_number(body, counter.generation);
  }
  put_array(body, absl::MakeConstSpan(request.blocks));
  put_array(body, absl::MakeConstSpan(request.tokens));
  if (body.size() > kMaxKvMessage) {
    return invalid(absl::StrCat("a request of ", request.tokens.size(), " tokens takes ",
                                body.size(), " bytes, more than ", kMaxKvMessage));
  }
  return absl::OkStatus();
}

absl::Status decode_kv_request(std::string_view body, KvLoadRequest& request, uint16_t version) {
  base::WireReader in(body);
  request.pull = version == kKvPullVersion;
  request.request = in.number<uint64_t>();
  request.decode = in.text(KvLoadRequest::kMaxName);
  request.key = in.text(KvLoadRequest::kMaxKey);
  request.loads_of_key = in.number<uint32_t>();
  request.share.ranks = in.number<uint32_t>();
  request.share.rank = in.number<uint32_t>();
  request.share.turn = in.number<uint64_t>();
  request.timeout = Time(in.number<int64_t>());
  request.lease = request.pull ? Time(in.number<int64_t>()) : Time();
  request.first_token = in.number<uint32_t>();
  if (in.failed()) return invalid("truncated request");
  if (absl::Status status = take_cache(in, request.layout, request.buffers, !request.pull);
      !status.ok()) {
    return status;
  }
  const auto counters = in.number<uint32_t>();
  if (counters != (request.pull ? 0 : request.layout.layers())) {
    return invalid("the number of counters differs from the number of layers");
  }
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
    return invalid("a failure without a reason");
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
    return invalid("a renewal whose time is out of range");
  }
  return timeout;
}

absl::Status check_kv_offer(const KvOffer& offer) {
  if (absl::Status status = offer.layout.check(); !status.ok()) return status;
  if (absl::Status status = check_lease(offer.lease); !status.ok()) return status;
  return check_buffers(offer.layout, offer.buffers, Access::kRemoteRead,
                       "peers may not read the cache's region");
}

absl::Status encode_kv_offer(const KvOffer& offer, std::string& body) {
  if (absl::Status status = check_kv_offer(offer); !status.ok()) return status;
  body.clear();
  base::put_number(body, int64_t{offer.lease.count()});
  put_cache(body, offer.layout, offer.buffers);
  return absl::OkStatus();
}

absl::Status decode_kv_offer(std::string_view body, KvOffer& offer) {
  base::WireReader in(body);
  offer.lease = Time(in.number<int64_t>());
  if (absl::Status status = take_cache(in, offer.layout, offer.buffers, true); !status.ok()) {
    return status;
  }
  if (!in.finished()) return invalid("overlong offer");
  return check_kv_offer(offer);
}

std::string encode_kv_ready(uint32_t layer, uint32_t first_block,
                            absl::Span<const uint32_t> blocks) {
  std::string body;
  base::put_number(body, layer);
  base::put_number(body, first_block);
  put_array(body, blocks);
  return body;
}

absl::Status decode_kv_ready(std::string_view body, KvReady& ready) {
  base::WireReader in(body);
  ready.layer = in.number<uint32_t>();
  ready.first_block = in.number<uint32_t>();
  take_array(in, ready.blocks);
  if (!in.finished() || ready.blocks.empty())
    return invalid("a report of ready blocks that names none");
  return absl::OkStatus();
}

std::string encode_kv_lease(const KvLease& lease) {
  std::string body;
  base::put_number(body, lease.number);
  base::put_number(body, int64_t{lease.lease.count()});
  return body;
}

absl::StatusOr<KvLease> decode_kv_lease(std::string_view body) {
  base::WireReader in(body);
  KvLease lease;
  lease.number = in.number<uint64_t>();
  lease.lease = Time(in.number<int64_t>());
  if (!in.finished()) return invalid("a lease without a duration");
  if (absl::Status status = check_lease(lease.lease); !status.ok()) return status;
  return lease;
}

}  // namespace baton::kvtransfer
