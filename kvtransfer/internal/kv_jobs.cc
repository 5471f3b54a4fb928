// The prefill side: turns the requests of decode workers into writes of blocks.
#include "kvtransfer/internal/kv_jobs.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "transport/base/log.h"

namespace baton::kvtransfer {
namespace {

std::string heads_name(const KvGroup& group) {
  return absl::StrCat("[", group.first_head, ", ", group.first_head + group.heads, ")");
}

Layout shifted(const Layout& layout, uint64_t bytes) {
  return Layout::box(layout.offset() + bytes, layout.dims(), layout.piece_bytes());
}

std::string seconds(Time time) {
  return absl::StrCat(std::chrono::duration<double>(time).count(), " s");
}

}  // namespace

void KvCacheMemory::set_layout(const KvLayout& new_layout) {
  layout = new_layout;
  layers.clear();
  for (uint32_t g = 0; g < layout.groups.size(); ++g) {
    for (uint32_t layer : layout.groups[g].layers) layers.push_back({layer, g});
  }
  std::sort(layers.begin(), layers.end(),
            [](const Layer& a, const Layer& b) { return a.layer < b.layer; });
}

// --- from peers ----------------------------------------------------------------------------------

void KvJobs::on_request(PeerId peer, uint64_t load, std::string_view body) {
  if (worker_.peer_state(peer) == PeerState::kDown) return;  // nobody to serve
  PeerRecord& state = peers_[peer_key(peer)];
  absl::StatusOr<bool> fresh = state.seen.add(load);
  if (fresh.ok() && !*fresh) return;  // cancelled before it came, or sent twice
  absl::Status status = fresh.status();
  if (status.ok()) status = decode_kv_request(body, incoming_);
  if (status.ok()) status = accept(peer, load, state);
  if (!status.ok()) on_bad_request(peer, load, status);
}

void KvJobs::on_bad_request(PeerId peer, uint64_t load, const absl::Status& why) {
  ++jobs_failed_;
  mailbox_.send(peer, KvMessageKind::kFailed, load, encode_kv_failure(why));
}

absl::Status KvJobs::accept(PeerId peer, uint64_t load, PeerRecord& state) {
  if (cache_ == nullptr) {
    return absl::UnavailableError("this worker has no KV cache yet: ask again in a moment");
  }
  if (jobs_.size() >= kMaxJobs) {
    return absl::ResourceExhaustedError(
        absl::StrCat("this worker has ", jobs_.size(), " jobs open already: ask another one"));
  }
  auto plan = plan_for(state, incoming_.layout);
  if (!plan.ok()) return plan.status();
  std::unique_ptr<KvSendJob> job;
  if (spare_.empty()) {
    job = std::make_unique<KvSendJob>();
  } else {
    job = std::move(spare_.back());
    spare_.pop_back();
  }
  std::swap(job->request, incoming_);
  job->number = next_number_++;
  job->peer = peer;
  job->load = load;
  job->plan = *std::move(plan);
  lay_out(*job);
  job->deadline = worker_.clock().now() + job->request.timeout;
  fresh_.push_back(job->number);
  by_load_[Key(peer_key(peer), load)] = job.get();
  jobs_[job->number] = std::move(job);
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const KvPlan>> KvJobs::plan_for(PeerRecord& state,
                                                               const KvLayout& target) {
  if (state.plan == nullptr || state.plan->target() != target) {
    absl::StatusOr<KvPlan> plan = KvPlan::make(cache_->layout, target);
    if (!plan.ok()) {
      // Decode computes its prompts itself then: whoever looks after this worker should know.
      if (!std::exchange(state.misfit_logged, true)) {
        log_event(LogLevel::kWarning, "no KV can be sent to decode worker %s: %s", incoming_.decode,
                  std::string(plan.status().message()));
      }
      return plan.status();
    }
    state.plan = std::make_shared<const KvPlan>(*std::move(plan));
  }
  if (state.plan->complete()) return state.plan;
  for (const KvPart& part : state.plan->parts()) {
    const KvGroup& theirs = target.groups[part.target_group];
    if (part.heads == KvHeads{theirs.first_head, theirs.first_head + theirs.heads}) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "this prefill worker holds KV heads ", heads_name(cache_->layout.groups[part.source_group]),
        " but the decode worker needs ", heads_name(theirs), ": ask one that holds them all"));
  }
  return absl::FailedPreconditionError(
      "this prefill worker does not hold all layers of the decode worker: ask one that does");
}

// What is to be sent of each of decode's layers, and where in `pages` our blocks of it go.
void KvJobs::lay_out(KvSendJob& job) const {
  const KvLoadRequest& request = job.request;
  job.layers.assign(cache_->layers.size(), KvSendJob::Layer());
  KvCacheMemory theirs;
  theirs.set_layout(request.layout);
  size_t pages = 0;
  for (size_t i = 0, counter = 0; i < cache_->layers.size(); ++i) {
    KvSendJob::Layer& layer = job.layers[i];
    layer.pages = pages;
    const KvPart* part = job.plan->find_layer(cache_->layers[i].layer, &layer.index);
    if (part == nullptr) continue;  // decode has no such layer
    while (theirs.layers[counter].layer != cache_->layers[i].layer) ++counter;
    layer.counter = static_cast<uint32_t>(counter);
    layer.part = static_cast<size_t>(part - job.plan->parts().data());
    layer.tokens = kept_tokens(request.layout.groups[part->target_group], request.first_token,
                               request.tokens.size());
    layer.blocks = blocks_of(cache_->layout.groups[part->source_group], layer.tokens);
    pages += layer.blocks.count;
    job.bytes += (layer.tokens.end - layer.tokens.begin) * part->bytes_per_token();
  }
  job.pages.assign(pages, KvSendJob::kNotSaved);
}

void KvJobs::on_cancel(PeerId peer, uint64_t load) {
  if (worker_.peer_state(peer) == PeerState::kDown) return;
  // A request that comes after its cancel must not start anything: remember the number.
  absl::StatusOr<bool> overtook = peers_[peer_key(peer)].seen.add(load);
  if (!overtook.ok()) return;  // no promise can be kept: decode keeps its blocks in quarantine
  auto it = by_load_.find(Key(peer_key(peer), load));
  if (it == by_load_.end() || it->second->told) {
    mailbox_.send(peer, KvMessageKind::kCancelled, load);
    return;
  }
  it->second->cancelled = true;
  stop(*it->second);
}

void KvJobs::on_peer_down(PeerId peer, const absl::Status& why) {
  peers_.erase(peer_key(peer));
  std::vector<KvSendJob*> orphans;
  for (auto& [number, job] : jobs_) {
    if (job->peer == peer) orphans.push_back(job.get());
  }
  for (KvSendJob* job : orphans) {
    job->told = true;  // nobody is there to be told
    if (job->wanted) {
      ++jobs_failed_;
      job->why = absl::UnavailableError(
          absl::StrCat("decode worker ", job->request.decode, " is gone: ", why.message()));
    }
    stop(*job);
  }
}

// --- from the engine -----------------------------------------------------------------------------

KvSendJob* KvJobs::find(uint64_t job) const {
  auto it = jobs_.find(job);
  return it == jobs_.end() ? nullptr : it->second.get();
}

std::optional<KvJob> KvJobs::next_job() {
  if (fresh_.empty()) return std::nullopt;
  KvSendJob& job = *find(fresh_.front());
  fresh_.pop_front();
  job.taken = true;
  KvJob out;
  out.job = job.number;
  out.request = job.request.request;
  out.decode = job.request.decode;
  out.tokens = job.request.tokens;
  out.first_token = job.request.first_token;
  return out;
}

bool KvJobs::is_wanted(uint64_t job) const {
  const KvSendJob* found = find(job);
  return found != nullptr && found->wanted;
}

absl::Status KvJobs::save_layer(uint64_t number, uint32_t layer, uint32_t first_block,
                                absl::Span<const uint32_t> blocks) {
  KvSendJob* job = find(number);
  if (job == nullptr) return absl::NotFoundError(absl::StrCat("there is no job ", number));
  if (!job->wanted) {
    return absl::CancelledError(absl::StrCat(
        "job ", number,
        " is not wanted any more: ", job->cancelled ? "decode cancelled it" : job->why.message()));
  }
  if (job->finished) {
    return absl::FailedPreconditionError(absl::StrCat("job ", number, " is finished already"));
  }
  const uint64_t end = uint64_t{first_block} + blocks.size();
  const size_t layers = cache_->layers.size();
  const size_t group = layer < layers ? cache_->layers[layer].group : 0;
  const uint64_t all = cache_->layout.blocks_for(job->request.tokens.size(), group);
  if (layer >= layers || end > all) {
    return absl::OutOfRangeError(absl::StrCat("job ", number, " has layers [0, ", layers,
                                              ") and blocks [0, ", all, "), not layer ", layer,
                                              ", blocks [", first_block, ", ", end, ")"));
  }
  const uint32_t cache_blocks = cache_->layout.groups[group].blocks;
  for (uint32_t block : blocks) {
    if (block >= cache_blocks) {
      return absl::OutOfRangeError(
          absl::StrCat("block ", block, " of a cache that has ", cache_blocks, " blocks"));
    }
  }
  // Blocks before the first are at decode already; blocks saved before are on their way.
  const KvSendJob::Layer& place = job->layers[layer];
  const KvBlockRange wanted = place.blocks;
  uint32_t* const pages = job->pages.data() + place.pages;
  KvBlockRange run;
  for (size_t i = 0; i < blocks.size(); ++i) {
    const uint64_t at = uint64_t{first_block} + i;
    const bool fresh = at >= wanted.first && at - wanted.first < wanted.count &&
                       pages[at - wanted.first] == KvSendJob::kNotSaved;
    if (fresh) {
      pages[at - wanted.first] = blocks[i];
      ++job->saved;
      if (run.count++ == 0) run.first = at;
    }
    const bool last = i + 1 == blocks.size();
    if (run.count == 0 || (fresh && !last)) continue;
    if (!serialized_) send_blocks(*job, layer, run);
    run = {};
  }
  return absl::OkStatus();
}

void KvJobs::finish_job(uint64_t number, const absl::Status& outcome) {
  KvSendJob* job = find(number);
  if (job == nullptr || job->finished) return;
  job->finished = true;
  if (!job->wanted) return;
  if (!outcome.ok()) return fail(*job, outcome);
  if (job->saved != job->pages.size()) {
    return fail(*job, absl::InternalError(absl::StrCat("prefill finished with ",
                                                       job->pages.size() - job->saved, " of ",
                                                       job->pages.size(), " blocks missing")));
  }
  if (!serialized_) return;
  for (uint32_t layer = 0; layer < job->layers.size(); ++layer) {
    send_blocks(*job, layer, job->layers[layer].blocks);
  }
}

bool KvJobs::is_saved(uint64_t number) {
  KvSendJob* job = find(number);
  if (job == nullptr) return true;
  if (!job->finished || !job->told || !job->sends.empty()) return false;
  forget(*job);
  return true;
}

// --- transfers -----------------------------------------------------------------------------------

// Sends what these blocks of ours, all of them saved, hold of the tokens that are asked for.
void KvJobs::send_blocks(KvSendJob& job, uint32_t layer_number, KvBlockRange blocks) {
  const KvSendJob::Layer& layer = job.layers[layer_number];
  const KvPart& part = job.plan->parts()[layer.part];
  const uint64_t size = cache_->layout.groups[part.source_group].block_tokens;
  const KvTokens tokens{std::max(blocks.first * size, layer.tokens.begin),
                        std::min((blocks.first + blocks.count) * size, layer.tokens.end)};
  const KvPages ours{layer.blocks.first,
                     absl::MakeConstSpan(job.pages).subspan(layer.pages, layer.blocks.count)};
  const absl::Status status =
      job.plan->for_each_move(layer.part, tokens, ours, job.request.pages(part.target_group),
                              {layer.index, layer.index + 1}, [&](const KvMove& move) {
                                if (!job.wanted) return absl::OkStatus();
                                KvSend& send = sends_.take();
                                send.job = &job;
                                send.move = move;
                                send.layer = layer.counter;
                                send.place = static_cast<uint32_t>(job.sends.size());
                                job.sends.push_back(&send);
                                if (!waiting_.empty() || !submit(send)) waiting_.push_back(&send);
                                return absl::OkStatus();
                              });
  if (!status.ok() && job.wanted) fail(job, status);
}

bool KvJobs::submit(KvSend& send) {
  KvSendJob& job = *send.job;
  const KvCacheMemory::Buffer& from = cache_->buffers[send.move.source_buffer];
  const KvRemoteBuffer& to = job.request.buffers[send.move.target_buffer];
  TransferRequest request;
  request.op = Op::kWrite;
  request.peer = job.peer;
  request.local = from.region;
  request.local_layout = shifted(send.move.source, from.remote.offset);
  request.remote = to.region;
  request.remote_layout = shifted(send.move.target, to.offset);
  request.counter = job.request.counters[send.layer];
  request.increment = send.move.counted_bytes;
  request.timeout = std::max(job.deadline - worker_.clock().now(), Time(1));
  absl::Status status = sends_.submit(send, request);
  if (absl::IsResourceExhausted(status)) return false;
  if (!status.ok()) {
    drop(send);
    fail(job, status);
  }
  return true;
}

void KvJobs::drop(KvSend& send) {
  std::vector<KvSend*>& sends = send.job->sends;
  sends.back()->place = send.place;
  sends[send.place] = sends.back();
  sends.pop_back();
  sends_.put_back(send);
}

void KvJobs::on_ended(KvSend& send) {
  KvSendJob& job = *send.job;
  const absl::Status status = send.status;
  if (status.ok()) {
    const uint64_t bytes = send.move.source.bytes();
    job.landed += send.move.counted_bytes;
    bytes_sent_ += bytes;
    if (timeline_ != nullptr) {
      timeline_->add({"transfer", absl::StrCat("tx layer ", send.layer), send.begin, send.end,
                      job.request.request, bytes});
    }
  }
  drop(send);
  if (!status.ok() && job.wanted) return fail(job, status);
  settle(job);
}

bool KvJobs::progress() {
  bool any = sends_.collect([this](KvSend& send) { on_ended(send); });
  while (!waiting_.empty()) {
    // Taken out first: a failing submit() empties its job's part of the queue.
    KvSend* send = waiting_.front();
    waiting_.pop_front();
    if (!submit(*send)) {
      waiting_.push_front(send);
      break;
    }
    any = true;
  }
  const Time now = worker_.clock().now();
  if (now < next_deadline()) return any;
  std::vector<KvSendJob*> late;
  for (auto& [number, job] : jobs_) {
    if (!job->told && job->wanted && job->deadline <= now) late.push_back(job.get());
  }
  for (KvSendJob* job : late) {
    fail(*job, absl::DeadlineExceededError(
                   absl::StrCat("the KV was not computed and sent within the ",
                                seconds(job->request.timeout), " that the load allows")));
  }
  return true;
}

Time KvJobs::next_deadline() const {
  Time first = kNever;
  for (const auto& [number, job] : jobs_) {
    if (!job->told && job->wanted) first = std::min(first, job->deadline);
  }
  return first;
}

void KvJobs::abandon() {
  for (auto& [number, job] : jobs_) {
    if (!job->sends.empty()) worker_.disconnect(job->peer);
  }
}

// --- how jobs end --------------------------------------------------------------------------------

void KvJobs::fail(KvSendJob& job, const absl::Status& why) {
  ++jobs_failed_;
  job.why = why;
  stop(job);
}

void KvJobs::stop(KvSendJob& job) {
  job.wanted = false;
  std::erase_if(waiting_, [&](KvSend* send) { return send->job == &job; });
  for (size_t i = job.sends.size(); i-- > 0;) {
    if (job.sends[i]->submitted) {
      sends_.cancel(*job.sends[i]);
    } else {
      drop(*job.sends[i]);
    }
  }
  settle(job);
}

// Tells decode how the job ended, once nothing of it moves.
void KvJobs::settle(KvSendJob& job) {
  if (!job.sends.empty()) return;
  if (!job.told) {
    if (job.landed == job.bytes) {
      mailbox_.send(job.peer, KvMessageKind::kDone, job.load);
    } else if (job.cancelled) {
      mailbox_.send(job.peer, KvMessageKind::kCancelled, job.load);
    } else if (!job.wanted) {
      mailbox_.send(job.peer, KvMessageKind::kFailed, job.load, encode_kv_failure(job.why));
    } else {
      return;  // blocks are still to come
    }
    job.told = true;
  }
  if (!job.taken) {  // the engine never hears of it
    std::erase(fresh_, job.number);
    forget(job);
  }
}

void KvJobs::forget(KvSendJob& job) {
  by_load_.erase(Key(peer_key(job.peer), job.load));
  auto it = jobs_.find(job.number);
  std::unique_ptr<KvSendJob> owned = std::move(it->second);
  jobs_.erase(it);
  // Keep what has memory, reset the rest.
  KvSendJob blank;
  std::swap(blank.request, owned->request);
  std::swap(blank.pages, owned->pages);
  std::swap(blank.layers, owned->layers);
  std::swap(blank.sends, owned->sends);
  *owned = std::move(blank);
  if (spare_.size() < 64) spare_.push_back(std::move(owned));
}

}  // namespace baton::kvtransfer
