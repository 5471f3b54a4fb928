// The prefill side of loads that pull: offers, blocks that are ready, and leases.
//
// The engine may use a block again when decode has said that its reads have ended, or when the
// lease is over: nothing else frees it. A connection that is lost does not, for a process that
// stood still may go on with a copy out of shared memory; its lease tells it that what it copied
// does not count.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvtransfer/internal/connector/kv_jobs.h"

namespace baton::kvtransfer {

absl::Status KvJobs::prepare_offer(const KvLoadRequest& request) {
  if (!options_.allow_pull) {
    return absl::FailedPreconditionError(
        "this prefill worker does not let its cache be read: set BatonConnectorOptions::allow_pull "
        "there, or load without pull");
  }
  offer_.lease = std::min(request.lease, options_.max_lease);
  if (offer_.buffers.empty()) {
    offer_.layout = cache_->layout;
    for (const KvCacheMemory::Buffer& buffer : cache_->buffers) {
      offer_.buffers.push_back(buffer.remote);
    }
  }
  return encode_kv(offer_, offer_body_);
}

void KvJobs::announce(const KvPush& push, uint32_t layer, KvBlockRange blocks) {
  const KvRoute::Layer& place = push.route.layers[layer];
  const absl::Span<const uint32_t> pages =
      absl::MakeConstSpan(push.route.pages)
          .subspan(place.pages + (blocks.first - place.blocks.first), blocks.count);
  for (size_t at = 0; at < pages.size(); at += KvReady::kMaxBlocks) {
    const absl::Span<const uint32_t> some = pages.subspan(at, KvReady::kMaxBlocks);
    mailbox_.send(
        push.peer, KvMessageKind::kReady, push.load,
        kv_bytes(
            KvReady{layer, static_cast<uint32_t>(blocks.first + at), {some.begin(), some.end()}}));
  }
}

void KvJobs::on_pulled(PeerId peer, uint64_t load) {
  KvPush* push = find(peer, load);
  if (push == nullptr || !push->request.pull) return;
  push->released = true;
  settle(*push);
}

void KvJobs::on_renew_lease(PeerId peer, uint64_t load, std::string_view body) {
  KvPush* push = find(peer, load);
  KvLease lease;
  const bool read = decode_kv(body, lease).ok();
  // What is released may be in use for something else: that cannot be renewed.
  if (push == nullptr || !push->request.pull || push->released || !read) return;
  lease.lease = std::min(lease.lease, options_.max_lease);
  // Renewals may overtake each other.
  push->lease = lease.lease;
  push->hold_until = std::max(push->hold_until, worker_.clock().now() + lease.lease);
  holds_.set(key_of(*push), push->hold_until);
  mailbox_.send(peer, KvMessageKind::kLeaseRenewed, load, kv_bytes(lease));
}

bool KvJobs::end_leases() {
  bool any = false;
  for (const Key& key : holds_.take(worker_.clock().now())) {
    ++looked_at_;
    const auto it = by_load_.find(key);
    if (it == by_load_.end() || !it->second->leased()) continue;
    KvPush* push = it->second;
    push->released = true;
    const absl::Status why = absl::DeadlineExceededError(
        absl::StrCat("decode did not renew its lease of ", seconds_of(push->lease),
                     " s, so prefill may reuse the blocks; ask again, with a longer lease if "
                     "decode's engine calls its connector less often"));
    if (!push->told) {
      fail(*push, why);
    } else if (push->wanted) {  // all was ready: decode has no other way to hear of it
      mailbox_.send(push->peer, KvMessageKind::kFailed, push->load, encode_kv_failure(why));
    }
    any = true;
  }
  return any;
}

}  // namespace baton::kvtransfer
