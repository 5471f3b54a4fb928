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

}  // namespace

absl::Status check_kv_size(size_t bytes) {
  if (bytes <= kMaxKvMessage) return absl::OkStatus();
  return invalid(
      absl::StrCat(bytes, " bytes, more than ", kMaxKvMessage, ": ask for the KV of fewer tokens"));
}

absl::Status malformed_kv(size_t at) {
  return invalid(absl::StrCat("truncated, overlong or out of range at byte ", at));
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

absl::Status KvLoadRequest::check() const {
  if (absl::Status status = layout.check(); !status.ok()) return status;
  if (decode.size() > KvLoadRequest::kMaxName) return invalid("the name is too long");
  if (timeout <= Time::zero() || timeout > KvLoadRequest::kMaxTimeout) {
    return invalid("the timeout must be more than nothing and at most a day");
  }
  if (key.size() > KvLoadRequest::kMaxKey) return invalid("the key is too long");
  if (share.ranks == 0 || share.ranks > KvLoadRequest::kMaxRanks || share.rank >= share.ranks) {
    return invalid(absl::StrCat("rank ", share.rank, " of ", share.ranks, " prefill workers"));
  }
  if (loads_of_key == 0 || loads_of_key > KvLoadRequest::kMaxRanks) {
    return invalid(absl::StrCat(loads_of_key, " loads of one key"));
  }
  if (first_token >= tokens.size()) return invalid("no tokens are requested");
  size_t wanted = 0;
  for (const KvGroup& group : layout.groups) {
    if (first_token % group.block_tokens != 0) {
      return invalid(absl::StrCat("first_token ", first_token,
                                  " is not a multiple of the block size ", group.block_tokens));
    }
    const auto count = blocks_of(group, kept_tokens(group, first_token, tokens.size())).count;
    if (count > blocks.size() - wanted) {
      return invalid(absl::StrCat("only ", blocks.size(), " blocks for KV that fills more"));
    }
    for (uint32_t block : absl::MakeConstSpan(blocks).subspan(wanted, count)) {
      if (block < group.blocks) continue;
      return invalid(
          absl::StrCat("block ", block, " of a cache that has ", group.blocks, " blocks"));
    }
    wanted += count;
  }
  if (blocks.size() != wanted) {
    return invalid(absl::StrCat(blocks.size(), " blocks for KV that fills ", wanted));
  }
  if (pull) {
    if (!buffers.empty() || !counters.empty()) {
      return invalid("a load that pulls cannot also name a region to be written");
    }
    return check_lease(lease);
  }
  if (absl::Status status = check_buffers(layout, buffers, Access::kRemoteWrite,
                                          "peers may not write to the cache's region");
      !status.ok()) {
    return status;
  }
  const WorkerUid& owner = buffers.front().region.owner;
  if (counters.size() != layout.layers())
    return invalid("the number of counters differs from the number of layers");
  for (const RemoteCounter& counter : counters) {
    if (counter.generation == 0) return invalid("a counter that does not exist");
    if (counter.owner != owner) return invalid("a counter of another worker");
  }
  return absl::OkStatus();
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

absl::Status KvRenewal::check() const {
  if (timeout > Time::zero() && timeout <= KvLoadRequest::kMaxTimeout) return absl::OkStatus();
  return invalid("a renewal whose time is out of range");
}

absl::Status KvOffer::check() const {
  if (absl::Status status = layout.check(); !status.ok()) return status;
  if (absl::Status status = check_lease(lease); !status.ok()) return status;
  return check_buffers(layout, buffers, Access::kRemoteRead,
                       "peers may not read the cache's region");
}

absl::Status KvReady::check() const {
  return blocks.empty() ? invalid("a report of ready blocks that names none") : absl::OkStatus();
}

absl::Status KvLease::check() const { return check_lease(lease); }

}  // namespace baton::kvtransfer
