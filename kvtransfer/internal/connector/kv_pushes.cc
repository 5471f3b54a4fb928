// The prefill side: what a push sends, its writes, how they end, and what decode is told.
#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvtransfer/internal/connector/kv_jobs.h"
#include "transport/base/log.h"

namespace baton::kvtransfer {
namespace {

Layout shifted(const Layout& layout, uint64_t bytes) {
  return Layout::box(layout.offset() + bytes, layout.dims(), layout.piece_bytes());
}

std::string heads_name(const KvGroup& group) {
  return absl::StrCat("[", group.first_head, ", ", group.first_head + group.heads, ")");
}

std::string seconds(Time time) {
  return absl::StrCat(std::chrono::duration<double>(time).count(), " s");
}

}  // namespace

absl::StatusOr<std::shared_ptr<const KvPlan>> KvJobs::plan_for(PeerRecord& state,
                                                               const KvLoadRequest& request) {
  const KvLayout& target = request.layout;
  if (state.plan == nullptr || state.share != request.share || state.plan->target() != target) {
    absl::StatusOr<KvPlan> plan = KvPlan::make(cache_->layout, target, request.share);
    if (!plan.ok()) {
      // Decode computes its prompts itself then: whoever looks after this worker should know.
      if (!std::exchange(state.misfit_logged, true)) {
        base::log_event(base::LogLevel::kWarning, "no KV can be sent to decode worker %s: %s",
                        request.decode, std::string(plan.status().message()));
      }
      return plan.status();
    }
    state.plan = std::make_shared<const KvPlan>(*std::move(plan));
    state.share = request.share;
  }
  if (state.plan->complete()) return state.plan;
  for (const KvPart& part : state.plan->parts()) {
    const KvGroup& theirs = target.groups[part.target_group];
    const KvHeads all{theirs.first_head, theirs.first_head + theirs.heads};
    if (part.heads == request.share.heads(theirs.total_heads, all)) continue;
    const std::string which = request.share.ranks > 1
                                  ? absl::StrCat("as rank ", request.share.rank, " of ",
                                                 request.share.ranks, " it should send others of ")
                                  : "";
    return absl::FailedPreconditionError(absl::StrCat(
        "this prefill worker holds KV heads ", heads_name(cache_->layout.groups[part.source_group]),
        " but ", which, "the decode worker needs ", heads_name(theirs),
        ": ask one that holds them all, or all workers of its group"));
  }
  return absl::FailedPreconditionError(
      "this prefill worker does not hold all layers of the decode worker: ask one that does");
}

// What is to be sent of each layer, and where in `pages` our blocks of it go.
void KvJobs::lay_out(KvPush& push) const {
  const KvLoadRequest& request = push.request;
  push.layers.assign(cache_->layers.size(), KvPush::Layer());
  push.landed_in.assign(request.blocks.size(), 0);
  KvCacheMemory theirs;
  theirs.set_layout(request.layout);
  size_t pages = 0;
  for (size_t i = 0, counter = 0; i < cache_->layers.size(); ++i) {
    KvPush::Layer& layer = push.layers[i];
    layer.pages = pages;
    const KvPart* part = push.plan->find_layer(cache_->layers[i].layer, &layer.index);
    if (part == nullptr || part->boxes.empty()) continue;  // decode needs nothing of it
    while (theirs.layers[counter].layer != cache_->layers[i].layer) ++counter;
    layer.counter = static_cast<uint32_t>(counter);
    layer.part = static_cast<size_t>(part - push.plan->parts().data());
    layer.tokens = kept_tokens(request.layout.groups[part->target_group], request.first_token,
                               request.tokens.size());
    layer.blocks = blocks_of(cache_->layout.groups[part->source_group], layer.tokens);
    pages += layer.blocks.count;
    push.bytes += (layer.tokens.end - layer.tokens.begin) * part->bytes_per_token();
  }
  push.pages.assign(pages, KvPush::kNotSaved);
}

// Sends what these blocks of ours, all of them saved, hold of the tokens that are asked for.
void KvJobs::send_blocks(KvPush& push, uint32_t layer_number, KvBlockRange blocks) {
  const KvPush::Layer& layer = push.layers[layer_number];
  const KvPart& part = push.plan->parts()[layer.part];
  const uint64_t size = cache_->layout.groups[part.source_group].block_tokens;
  const KvTokens tokens{std::max(blocks.first * size, layer.tokens.begin),
                        std::min((blocks.first + blocks.count) * size, layer.tokens.end)};
  const KvPages ours{layer.blocks.first,
                     absl::MakeConstSpan(push.pages).subspan(layer.pages, layer.blocks.count)};
  const absl::Status status =
      push.plan->for_each_move(layer.part, tokens, ours, push.request.pages(part.target_group),
                               {layer.index, layer.index + 1}, [&](const KvMove& move) {
                                 if (!push.wanted) return absl::OkStatus();
                                 KvSend& send = sends_.take();
                                 send.push = &push;
                                 send.move = move;
                                 send.layer = layer_number;
                                 send.place = static_cast<uint32_t>(push.sends.size());
                                 push.sends.push_back(&send);
                                 if (!waiting_.empty() || !submit(send)) waiting_.push_back(&send);
                                 return absl::OkStatus();
                               });
  if (!status.ok() && push.wanted) fail(push, status);
}

bool KvJobs::submit(KvSend& send) {
  KvPush& push = *send.push;
  const KvCacheMemory::Buffer& from = cache_->buffers[send.move.source_buffer];
  const KvRemoteBuffer& to = push.request.buffers[send.move.target_buffer];
  TransferRequest request;
  request.op = Op::kWrite;
  request.peer = push.peer;
  request.local = from.region;
  request.local_layout = shifted(send.move.source, from.remote.offset);
  request.remote = to.region;
  request.remote_layout = shifted(send.move.target, to.offset);
  request.counter = push.request.counters[push.layers[send.layer].counter];
  request.increment = send.move.counted_bytes;
  // The push has the deadline, which may be moved while this is under way.
  absl::Status status = sends_.submit(send, request);
  if (absl::IsResourceExhausted(status)) return false;
  if (!status.ok()) {
    drop(send);
    fail(push, status);
  }
  return true;
}

void KvJobs::drop(KvSend& send) {
  std::vector<KvSend*>& sends = send.push->sends;
  sends.back()->place = send.place;
  sends[send.place] = sends.back();
  sends.pop_back();
  sends_.put_back(send);
}

void KvJobs::on_ended(KvSend& send) {
  KvPush& push = *send.push;
  const absl::Status status = send.status;
  if (status.ok()) {
    const uint64_t bytes = send.move.source.bytes();
    count(push, send);
    bytes_sent_ += bytes;
    if (timeline_ != nullptr) {
      timeline_->add({"transfer", absl::StrCat("tx layer ", send.layer), send.begin, send.end,
                      push.request.request, bytes});
    }
  }
  drop(send);
  if (!status.ok() && push.wanted) return fail(push, status);
  settle(push);
}

// Which of decode's blocks the move has filled, and how far.
void KvJobs::count(KvPush& push, const KvSend& send) {
  push.landed += send.move.counted_bytes;
  const KvPart& part = push.plan->parts()[push.layers[send.layer].part];
  const KvPages pages = push.request.pages(part.target_group);
  const size_t base = static_cast<size_t>(pages.pages.data() - push.request.blocks.data());
  const uint64_t size = push.request.layout.groups[part.target_group].block_tokens;
  const KvTokens tokens = send.move.tokens;
  const uint64_t per_token = send.move.counted_bytes / (tokens.end - tokens.begin);
  for (uint64_t at = tokens.begin; at < tokens.end;) {
    const uint64_t end = std::min((at / size + 1) * size, tokens.end);
    push.landed_in[base + (at / size - pages.first_block)] += (end - at) * per_token;
    at = end;
  }
}

// A bit for each of decode's blocks: all that this worker owes it is there.
std::string KvJobs::arrived_blocks(const KvPush& push) const {
  std::string bits((push.request.blocks.size() + 7) / 8, '\0');
  for (const KvPart& part : push.plan->parts()) {
    const KvGroup& group = push.request.layout.groups[part.target_group];
    const KvPages pages = push.request.pages(part.target_group);
    const size_t base = static_cast<size_t>(pages.pages.data() - push.request.blocks.data());
    const KvTokens kept = kept_tokens(group, push.request.first_token, push.request.tokens.size());
    uint64_t per_token = 0;
    for (const KvPart& other : push.plan->parts()) {
      if (other.target_group != part.target_group) continue;
      per_token += other.bytes_per_token() * other.layers.size();
    }
    for (size_t i = 0; i < pages.pages.size(); ++i) {
      const uint64_t begin = (pages.first_block + i) * group.block_tokens;
      const uint64_t tokens =
          std::min(begin + group.block_tokens, kept.end) - std::max(begin, kept.begin);
      if (push.landed_in[base + i] != tokens * per_token) continue;
      bits[(base + i) / 8] = static_cast<char>(bits[(base + i) / 8] | 1 << (base + i) % 8);
    }
  }
  return bits;
}

bool KvJobs::progress() {
  bool any = sends_.collect([this](KvSend& send) { on_ended(send); });
  while (!waiting_.empty()) {
    // Taken out first: a failing submit() empties its push's part of the queue.
    KvSend* send = waiting_.front();
    waiting_.pop_front();
    if (!submit(*send)) {
      waiting_.push_front(send);
      break;
    }
    any = true;
  }
  const Time now = worker_.clock().now();
  std::vector<KvPush*> late;
  for (auto& [key, push] : by_load_) {
    if (!push->told && push->wanted && push->deadline <= now) late.push_back(push);
  }
  for (KvPush* push : late) {
    fail(*push, absl::DeadlineExceededError(
                    absl::StrCat("the KV was not computed and sent within the ",
                                 seconds(push->request.timeout), " that the load allows")));
    any = true;
  }
  return any;
}

Time KvJobs::next_deadline() const {
  Time first = kNever;
  for (const auto& [key, push] : by_load_) {
    if (!push->told && push->wanted) first = std::min(first, push->deadline);
  }
  const Time now = worker_.clock().now();
  for (const auto& [key, job] : by_key_) {
    if (job->loads_to_come > 0 && job->lease > now) first = std::min(first, job->lease);
  }
  return first;
}

void KvJobs::abandon() {
  for (auto& [key, push] : by_load_) {
    if (!push->sends.empty()) worker_.disconnect(push->peer, Time::zero()).IgnoreError();
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
  std::erase_if(waiting_, [&](KvSend* send) { return send->push == &push; });
  for (size_t i = push.sends.size(); i-- > 0;) {
    if (push.sends[i]->submitted) {
      sends_.cancel(*push.sends[i]);
    } else {
      drop(*push.sends[i]);
    }
  }
  settle(push);
}

// Tells decode how the push ended, once nothing of it moves.
void KvJobs::settle(KvPush& push) {
  if (!push.sends.empty()) return;
  KvSendJob& job = *push.job;
  if (!push.told) {
    if (push.landed == push.bytes && job.finished && job.outcome.ok()) {
      mailbox_.send(push.peer, KvMessageKind::kDone, push.load, job.payload);
    } else if (push.cancelled) {
      mailbox_.send(push.peer, KvMessageKind::kCancelled, push.load);
    } else if (!push.wanted) {
      mailbox_.send(push.peer, KvMessageKind::kFailed, push.load,
                    encode_kv_failure(push.why, arrived_blocks(push)));
    } else {
      return;  // blocks are still to come, or the payload
    }
    push.told = true;
  }
  if (job.taken || may_still_come(job)) return;
  const bool over = std::all_of(job.pushes.begin(), job.pushes.end(),
                                [](const auto& each) { return each->over(); });
  if (!over) return;
  std::erase(fresh_, job.number);  // the engine never hears of it
  forget(job);
}

void KvJobs::forget(KvSendJob& job) {
  if (auto it = by_key_.find(job.key); it != by_key_.end() && it->second == &job) by_key_.erase(it);
  for (std::unique_ptr<KvPush>& owned : job.pushes) {
    by_load_.erase(Key(peer_key(owned->peer), owned->load));
    // Keep what has memory, reset the rest.
    KvPush blank;
    std::swap(blank.request, owned->request);
    std::swap(blank.pages, owned->pages);
    std::swap(blank.layers, owned->layers);
    std::swap(blank.landed_in, owned->landed_in);
    std::swap(blank.sends, owned->sends);
    *owned = std::move(blank);
    if (spare_.size() < 64) spare_.push_back(std::move(owned));
  }
  jobs_.erase(job.number);
}

}  // namespace baton::kvtransfer
