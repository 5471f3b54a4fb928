// The decode side of loads that pull: offers, reads, leases, and how they end.
#include "kvtransfer/internal/connector/kv_pulls.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace baton::kvtransfer {
namespace {

// Two clocks that are steered may run at speeds that differ by a thousandth.
constexpr int kClockSlack = 512;
// Renewals per lease time.
constexpr int kRenewals = 3;

}  // namespace

void KvPulls::begin(KvPull& pull) {
  const Time now = worker_.clock().now();
  pull.asked.emplace_back(0, now);
  pull.lease = pull.request->lease;
  pull.renew_at = now + pull.lease / kRenewals;
}

absl::Status KvPulls::on_offer(KvPull& pull, std::string_view body) {
  if (pull.offered || pull.stopped) return absl::OkStatus();
  if (absl::Status status = decode_kv(body, offer_); !status.ok()) return status;
  auto plan = agreements_[peer_key(pull.peer)].plan(offer_.layout, cache_->layout, pull.share);
  if (!plan.ok()) return plan.status();
  pull.offered = true;
  std::swap(pull.buffers, offer_.buffers);
  pull.route.begin(*std::move(plan), *pull.request);
  confirm(pull, pull.asked.front().second, offer_.lease);
  const std::vector<KvReady> early = std::move(pull.early);
  for (const KvReady& ready : early) {
    if (absl::Status status = read(pull, ready); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status KvPulls::on_ready(KvPull& pull, std::string_view body) {
  if (pull.stopped) return absl::OkStatus();
  if (absl::Status status = decode_kv(body, ready_); !status.ok()) return status;
  if (pull.offered) return read(pull, ready_);
  pull.early_blocks += ready_.blocks.size();
  if (pull.early_blocks > kMaxKvMessage / sizeof(uint32_t)) {
    return absl::InvalidArgumentError("blocks are reported ready before the layout of their cache");
  }
  pull.early.push_back(ready_);
  return absl::OkStatus();
}

absl::Status KvPulls::on_lease_renewed(KvPull& pull, std::string_view body) {
  KvLease lease;
  if (absl::Status status = decode_kv(body, lease); !status.ok()) return status;
  const auto it = std::find_if(pull.asked.begin(), pull.asked.end(),
                               [&](const auto& each) { return each.first == lease.number; });
  if (it == pull.asked.end() || lease.number == 0) return absl::OkStatus();
  const Time asked = it->second;
  pull.asked.erase(it);
  confirm(pull, asked, lease.lease);
  return absl::OkStatus();
}

// Prefill holds the blocks for `lease` from a moment that was not before `asked`.
void KvPulls::confirm(KvPull& pull, Time asked, Time lease) {
  lease = pull.lease = std::min(lease, pull.request->lease);
  pull.confirmed = std::max(pull.confirmed, asked + lease - lease / kClockSlack);
  pull.renew_at = std::min(pull.renew_at, asked + lease / kRenewals);
  if (pull.stopped) return;
  std::erase_if(pull.unconfirmed, [&](const KvPull::Read& read) {
    if (read.end >= pull.confirmed) return false;
    count(pull, read);
    return true;
  });
  settle(pull);
}

bool KvPulls::renew(KvPull& pull, Time now) {
  if (pull.stopped || pull.told || now < pull.renew_at) return false;
  if (pull.asked.size() == KvPull::kMaxAsked) pull.asked.erase(pull.asked.begin() + 1);
  pull.asked.emplace_back(++pull.renewals, now);
  pull.renew_at = now + pull.lease / kRenewals;
  mailbox_.send(pull.peer, KvMessageKind::kRenewLease, pull.number,
                kv_bytes(KvLease{pull.renewals, pull.request->lease}));
  return true;
}

// Reads what these blocks of prefill's hold of the tokens that are asked for.
absl::Status KvPulls::read(KvPull& pull, const KvReady& ready) {
  KvRoute& route = pull.route;
  const bool layer_exists = ready.layer < route.layers.size();
  const KvBlockRange wanted = layer_exists ? route.layers[ready.layer].blocks : KvBlockRange();
  if (ready.first_block < wanted.first ||
      ready.first_block + ready.blocks.size() > wanted.first + wanted.count) {
    return absl::InvalidArgumentError(absl::StrCat("it reports that blocks [", ready.first_block,
                                                   ", ", ready.first_block + ready.blocks.size(),
                                                   ") of layer ", ready.layer,
                                                   " are ready, but they were not requested"));
  }
  absl::Status status;
  route.save(ready.layer, ready.first_block, ready.blocks, [&](KvBlockRange run) {
    if (!status.ok()) return;
    status = route.for_each_move(ready.layer, run, *pull.request, [&](const KvMove& move) {
      sends_.begin(pull, ready.layer, move);
      return pull.failure;
    });
  });
  return status;
}

void KvPulls::fill(const KvSend& send, TransferRequest& request) {
  const auto& pull = static_cast<const KvPull&>(*send.flow);
  set_sides(request, request.op, send.move,
            cache_->buffers[local_buffer(request.op, send.move)].local(),
            pull.buffers[remote_buffer(request.op, send.move)]);
}

void KvPulls::on_refused(KvFlow& flow, const absl::Status& why) {
  auto& pull = static_cast<KvPull&>(flow);
  if (pull.failure.ok()) failed_.emplace_back(pull.peer, pull.number);
  pull.failure.Update(why);
}

void KvPulls::on_ended(const KvSend& send) {
  auto& pull = static_cast<KvPull&>(*send.flow);
  if (!send.status.ok()) {
    if (!pull.stopped) on_refused(pull, send.status);
  } else {
    if (timeline_ != nullptr) {
      timeline_->add({"transfer", absl::StrCat("rx layer ", send.layer), send.begin, send.end,
                      pull.request->request, send.move.target.bytes()});
    }
    const KvPull::Read read{send.move, send.layer, send.end};
    if (read.end < pull.confirmed) {
      count(pull, read);
    } else if (!pull.stopped) {
      pull.unconfirmed.push_back(read);
    }
  }
  settle(pull);
}

void KvPulls::count(KvPull& pull, const KvPull::Read& read) {
  pull.route.count(read.layer, read.move, *pull.request);
  (*pull.arrived)[pull.route.layers[read.layer].counter] += read.move.counted_bytes;
}

void KvPulls::stop(KvPull& pull) {
  if (std::exchange(pull.stopped, true)) return;
  pull.unconfirmed.clear();
  sends_.stop(pull);
  settle(pull);
}

void KvPulls::settle(KvPull& pull) {
  if (!pull.quiet() || std::exchange(pull.told, true)) return;
  mailbox_.send(pull.peer, pull.complete() ? KvMessageKind::kPulled : KvMessageKind::kCancel,
                pull.number);
}

void KvPulls::on_peer_down(PeerId peer) { agreements_.erase(peer_key(peer)); }

}  // namespace baton::kvtransfer
