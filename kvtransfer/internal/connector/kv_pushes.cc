// The prefill side: what a push sends, its writes, how they end, and what decode is told.
#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvtransfer/internal/connector/kv_jobs.h"
#include "transport/base/log.h"

namespace baton::kvtransfer {

absl::StatusOr<std::shared_ptr<const KvPlan>> KvJobs::plan_for(PeerRecord& state,
                                                               const KvLoadRequest& request) {
  auto plan = state.agreement.plan(cache_->layout, request.layout, request.share);
  // Decode computes its prompts itself then: whoever looks after this worker should know.
  if (!plan.ok() && !std::exchange(state.misfit_logged, true)) {
    base::log_event(base::LogLevel::kWarning, "no KV can be sent to decode worker %s: %s",
                    request.decode, std::string(plan.status().message()));
  }
  return plan;
}

// Sends what these blocks of ours, all of them saved, hold of the tokens that are asked for.
void KvJobs::send_blocks(KvPush& push, uint32_t layer, KvBlockRange blocks) {
  if (push.request.pull) return announce(push, layer, blocks);
  const absl::Status status =
      push.route.for_each_move(layer, blocks, push.request, [&](const KvMove& move) {
        if (push.wanted) sends_.begin(push, layer, move);
        return absl::OkStatus();
      });
  if (!status.ok() && push.wanted) fail(push, status);
}

void KvJobs::fill(const KvSend& send, TransferRequest& request) {
  const auto& push = static_cast<const KvPush&>(*send.flow);
  set_sides(request, request.op, send.move,
            cache_->buffers[local_buffer(request.op, send.move)].local(),
            push.request.buffers[remote_buffer(request.op, send.move)]);
  request.counter = push.request.counters[push.route.layers[send.layer].counter];
  request.increment = send.move.counted_bytes;
  // The push has the deadline, which may be moved while this is under way.
}

void KvJobs::on_refused(KvFlow& flow, const absl::Status& why) {
  fail(static_cast<KvPush&>(flow), why);
}

void KvJobs::on_ended(const KvSend& send) {
  auto& push = static_cast<KvPush&>(*send.flow);
  if (send.status.ok()) {
    const uint64_t bytes = send.move.source.bytes();
    push.route.count(send.layer, send.move, push.request);
    bytes_sent_ += bytes;
    if (timeline_ != nullptr) {
      timeline_->add({"transfer", absl::StrCat("tx layer ", send.layer), send.begin, send.end,
                      push.request.request, bytes});
    }
  } else if (push.wanted) {
    return fail(push, send.status);
  }
  settle(push);
}

bool KvJobs::progress() {
  bool any = sends_.progress();
  const Time now = worker_.clock().now();
  openings_.take(now);  // sleepers then ask whether the job is wanted
  for (const Key& key : deadlines_.take(now)) {
    ++looked_at_;
    const auto it = by_load_.find(key);
    if (it == by_load_.end() || it->second->told || !it->second->wanted) continue;
    KvPush& push = *it->second;
    fail(push, absl::DeadlineExceededError(
                   absl::StrCat("the KV was not computed and sent within the ",
                                seconds_of(push.request.timeout), " s that the load allows")));
    any = true;
  }
  return any;
}

Time KvJobs::next_deadline() const {
  return std::min({deadlines_.first(), holds_.first(), openings_.first()});
}

void KvJobs::abandon() {
  for (auto& [key, push] : by_load_) {
    if (!push->open.empty()) worker_.disconnect(push->peer, Time::zero()).IgnoreError();
  }
}

// --- how pushes end ------------------------------------------------------------------------------

void KvJobs::fail(KvPush& push, const absl::Status& why) {
  ++jobs_failed_;
  push.why = why;
  stop(push);
}

void KvJobs::stop(KvPush& push) {
  push.wanted = false;
  sends_.stop(push);
  settle(push);
}

// Tells decode how the push ended, once nothing of it moves (and all that it pulls is ready).
void KvJobs::settle(KvPush& push) {
  if (!push.open.empty()) return;
  KvSendJob& job = *push.job;
  if (!push.told) {
    const KvRoute& route = push.route;
    const bool all = push.request.pull ? route.all_saved() : route.landed == route.bytes;
    if (all && job.finished && job.outcome.ok()) {
      mailbox_.send(push.peer, KvMessageKind::kDone, push.load, job.payload);
    } else if (push.cancelled) {
      mailbox_.send(push.peer, KvMessageKind::kCancelled, push.load);
    } else if (!push.wanted) {
      mailbox_.send(push.peer, KvMessageKind::kFailed, push.load,
                    encode_kv_failure(push.why, route.arrived(push.request)));
    } else {
      return;  // blocks are still to come, or the payload
    }
    push.told = true;
    deadlines_.erase(key_of(push));
  }
  if (!push.leased()) holds_.erase(key_of(push));
  if (job.taken || may_still_come(job)) return;
  const bool over = std::all_of(job.pushes.begin(), job.pushes.end(),
                                [](const auto& each) { return each->over(); });
  if (!over) return;
  std::erase(fresh_, job.number);  // the engine never hears of it
  forget(job);
}

void KvJobs::forget(KvSendJob& job) {
  if (auto it = by_key_.find(job.key); it != by_key_.end() && it->second == &job) by_key_.erase(it);
  openings_.erase(job.number);
  for (std::unique_ptr<KvPush>& owned : job.pushes) {
    by_load_.erase(key_of(*owned));
    deadlines_.erase(key_of(*owned));
    holds_.erase(key_of(*owned));
    // Keep what has memory, reset the rest.
    KvPush blank;
    std::swap(blank.request, owned->request);
    std::swap(blank.route, owned->route);
    std::swap(blank.open, owned->open);
    *owned = std::move(blank);
    if (spare_.size() < 64) spare_.push_back(std::move(owned));
  }
  jobs_.erase(job.number);
}

}  // namespace baton::kvtransfer
