// The prefill side: jobs, the loads that want them, and what the engine says about them.
#include "kvtransfer/internal/connector/kv_jobs.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace baton::kvtransfer {

// --- from peers ----------------------------------------------------------------------------------

void KvJobs::on_request(PeerId peer, uint64_t load, std::string_view body, uint16_t version) {
  if (worker_.peer_state(peer) == PeerState::kDown) return;  // no peer to serve
  PeerRecord& state = peers_[peer_key(peer)];
  absl::StatusOr<bool> fresh = state.seen.add(load);
  if (fresh.ok() && !*fresh) return;  // cancelled before it came, or sent twice
  absl::Status status = fresh.status();
  incoming_.pull = version == kKvPullVersion;
  if (status.ok()) status = decode_kv(body, incoming_);
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
  if (by_load_.size() >= kMaxJobs) {
    return absl::ResourceExhaustedError(absl::StrCat("this worker has ", by_load_.size(),
                                                     " loads open already: ask another worker"));
  }
  auto plan = plan_for(state, incoming_);
  if (!plan.ok()) return plan.status();
  if (incoming_.pull) {
    if (absl::Status status = prepare_offer(incoming_); !status.ok()) return status;
  }
  absl::StatusOr<KvSendJob*> job = job_for(incoming_);
  if (!job.ok()) return job.status();
  std::unique_ptr<KvPush> owned;
  if (spare_.empty()) {
    owned = std::make_unique<KvPush>();
  } else {
    owned = std::move(spare_.back());
    spare_.pop_back();
  }
  KvPush& push = *owned;
  (*job)->pushes.push_back(std::move(owned));
  std::swap(push.request, incoming_);
  push.job = *job;
  push.peer = peer;
  push.load = load;
  push.route.begin(*std::move(plan), push.request);
  by_load_[key_of(push)] = &push;
  const Time now = worker_.clock().now();
  if (push.request.pull) {
    // Decode has the deadline, and lets its lease run out.
    push.lease = offer_.lease;
    push.hold_until = now + push.lease;
    holds_.set(key_of(push), push.hold_until);
    mailbox_.send(peer, KvMessageKind::kOffer, load, offer_body_);
  } else {
    push.deadline = now + push.request.timeout;
    deadlines_.set(key_of(push), push.deadline);
  }
  catch_up(push);
  return absl::OkStatus();
}

// The job that the load joins, or a new one.
absl::StatusOr<KvSendJob*> KvJobs::job_for(const KvLoadRequest& request) {
  const Time until = worker_.clock().now() + request.timeout;
  if (auto it = by_key_.find(request.key); !request.key.empty() && it != by_key_.end()) {
    KvSendJob& job = *it->second;
    if (request.tokens.size() > job.tokens) {
      return absl::InvalidArgumentError(absl::StrCat("the load asks for ", request.tokens.size(),
                                                     " tokens, but job \"", request.key, "\" has ",
                                                     job.tokens));
    }
    for (const std::unique_ptr<KvPush>& push : job.pushes) {
      const std::vector<int32_t>& known = push->request.tokens;
      const size_t both = std::min(known.size(), request.tokens.size());
      if (std::equal(known.begin(), known.begin() + static_cast<ptrdiff_t>(both),
                     request.tokens.begin())) {
        continue;
      }
      return absl::InvalidArgumentError(
          absl::StrCat("job \"", request.key, "\" has different tokens: a key names one request"));
    }
    if (!may_still_come(job)) {
      return absl::FailedPreconditionError(
          absl::StrCat("job \"", request.key,
                       "\" has had all its loads, or its lease is over: ask without the key, or "
                       "have prefill bind it for more loads or for longer"));
    }
    if (--job.loads_to_come == 0) openings_.erase(job.number);
    return &job;
  }
  KvSendJob& job = open_job(request.key, request.tokens.size());
  job.loads_to_come = request.key.empty() ? 0 : request.loads_of_key - 1;
  job.lease = until;
  if (job.loads_to_come > 0) openings_.set(job.number, until);
  fresh_.push_back(job.number);
  return &job;
}

KvSendJob& KvJobs::open_job(const std::string& key, uint64_t tokens) {
  auto owned = std::make_unique<KvSendJob>();
  KvSendJob& job = *owned;
  job.number = next_number_++;
  job.key = key;
  job.tokens = tokens;
  if (!key.empty()) {
    by_key_[key] = &job;
    for (const KvLayerPlace& layer : cache_->layers) {
      job.pages.emplace_back(cache_->layout.blocks_for(tokens, layer.group), KvRoute::kNotSaved);
    }
  }
  jobs_[job.number] = std::move(owned);
  return job;
}

void KvJobs::on_cancel(PeerId peer, uint64_t load) {
  if (worker_.peer_state(peer) == PeerState::kDown) return;
  // A request that comes after its cancel must not start anything: remember the number.
  absl::StatusOr<bool> overtook = peers_[peer_key(peer)].seen.add(load);
  if (!overtook.ok()) return;  // no promise can be kept: decode keeps its blocks in quarantine
  KvPush* push = find(peer, load);
  if (push != nullptr && push->request.pull) push->released = true;  // its reads have ended
  if (push == nullptr || push->told) {
    mailbox_.send(peer, KvMessageKind::kCancelled, load);
    if (push != nullptr) settle(*push);
    return;
  }
  push->cancelled = true;
  stop(*push);
}

void KvJobs::on_renew(PeerId peer, uint64_t load, std::string_view body) {
  KvPush* push = find(peer, load);
  KvRenewal renewal;
  const bool read = decode_kv(body, renewal).ok();
  if (push == nullptr || push->request.pull || !read) return;
  push->deadline = worker_.clock().now() + renewal.timeout;
  deadlines_.set(key_of(*push), push->deadline);
}

void KvJobs::on_peer_down(PeerId peer, const absl::Status& why) {
  peers_.erase(peer_key(peer));
  std::vector<Key> orphans;
  for (auto& [key, push] : by_load_) {
    if (push->peer == peer) orphans.push_back(key);
  }
  for (const Key& key : orphans) {
    KvPush* push = find(peer, key.second);
    if (push == nullptr) continue;  // its job went with another of them
    push->told = true;              // no peer is there to be told
    if (push->wanted) {
      ++jobs_failed_;
      push->why = absl::UnavailableError(
          absl::StrCat("decode worker ", push->request.decode, " is gone: ", why.message()));
    }
    stop(*push);
  }
}

// --- from the engine -----------------------------------------------------------------------------

KvSendJob* KvJobs::find(uint64_t job) const {
  // The engine knows only those that it was given.
  auto it = jobs_.find(job);
  return it == jobs_.end() || !it->second->taken ? nullptr : it->second.get();
}

KvPush* KvJobs::find(PeerId peer, uint64_t load) const {
  auto it = by_load_.find(Key(peer_key(peer), load));
  return it == by_load_.end() ? nullptr : it->second;
}

bool KvJobs::may_still_come(const KvSendJob& job) const {
  return job.loads_to_come > 0 && worker_.clock().now() < job.lease && job.outcome.ok();
}

std::optional<KvJob> KvJobs::next_job() {
  if (fresh_.empty()) return std::nullopt;
  KvSendJob& job = *jobs_.at(fresh_.front());
  fresh_.pop_front();
  job.taken = true;
  const KvLoadRequest& request = job.pushes.front()->request;
  KvJob out;
  out.job = job.number;
  out.request = request.request;
  out.decode = request.decode;
  out.key = request.key;
  out.loads_of_key = request.loads_of_key;
  out.tokens = request.tokens;
  // Loads that are still to come may need tokens that this one has.
  out.first_token = job.key.empty() ? request.first_token : 0;
  return out;
}

absl::StatusOr<uint64_t> KvJobs::bind(const KvBinding& binding) {
  if (cache_ == nullptr) {
    return absl::FailedPreconditionError(
        "the connector has no cache yet: register_cache() comes before the first job");
  }
  if (binding.key.empty() || binding.key.size() > KvLoadRequest::kMaxKey || binding.tokens == 0 ||
      binding.loads == 0 || binding.loads > KvLoadRequest::kMaxRanks ||
      binding.lease <= Time::zero()) {
    return absl::InvalidArgumentError(absl::StrCat("a job that is bound needs a key of 1 to ",
                                                   KvLoadRequest::kMaxKey, " bytes, tokens, 1 to ",
                                                   KvLoadRequest::kMaxRanks, " loads and a lease"));
  }
  if (by_key_.contains(binding.key)) {
    return absl::AlreadyExistsError(absl::StrCat("job \"", binding.key, "\" is open already"));
  }
  if (jobs_.size() >= kMaxJobs) {
    return absl::ResourceExhaustedError(absl::StrCat(jobs_.size(), " jobs are open already"));
  }
  KvSendJob& job = open_job(binding.key, binding.tokens);
  job.loads_to_come = binding.loads;
  job.taken = true;
  renew_job(job.number, binding.lease).IgnoreError();
  return job.number;
}

absl::Status KvJobs::renew_job(uint64_t number, Time lease) {
  KvSendJob* job = find(number);
  if (job == nullptr) return absl::NotFoundError(absl::StrCat("there is no job ", number));
  job->lease = worker_.clock().now() + std::clamp(lease, Time(0), KvLoadRequest::kMaxTimeout);
  if (job->loads_to_come > 0) openings_.set(number, job->lease);
  return absl::OkStatus();
}

absl::Status KvJobs::give_payload(uint64_t number, std::string payload) {
  KvSendJob* job = find(number);
  if (job == nullptr) return absl::NotFoundError(absl::StrCat("there is no job ", number));
  if (job->finished) {
    return absl::FailedPreconditionError(absl::StrCat("job ", number, " is finished already"));
  }
  if (payload.size() > KvConnector::kMaxPayload) {
    return absl::InvalidArgumentError(absl::StrCat("a payload of ", payload.size(),
                                                   " bytes; at most ", KvConnector::kMaxPayload));
  }
  job->payload = std::move(payload);
  return absl::OkStatus();
}

bool KvJobs::is_wanted(uint64_t number) const {
  const KvSendJob* job = find(number);
  if (job == nullptr) return false;
  return may_still_come(*job) || std::any_of(job->pushes.begin(), job->pushes.end(),
                                             [](const auto& push) { return push->wanted; });
}

absl::Status KvJobs::check_blocks(const KvSendJob& job, uint32_t layer, uint32_t first_block,
                                  absl::Span<const uint32_t> blocks) const {
  const uint64_t end = uint64_t{first_block} + blocks.size();
  const size_t layers = cache_->layers.size();
  const size_t group = layer < layers ? cache_->layers[layer].group : 0;
  const uint64_t all = cache_->layout.blocks_for(job.tokens, group);
  if (layer >= layers || end > all) {
    return absl::OutOfRangeError(absl::StrCat("job ", job.number, " has layers [0, ", layers,
                                              ") and blocks [0, ", all, "), not layer ", layer,
                                              ", blocks [", first_block, ", ", end, ")"));
  }
  const uint32_t cache_blocks = cache_->layout.groups[group].blocks;
  for (uint32_t block : blocks) {
    if (block < cache_blocks) continue;
    return absl::OutOfRangeError(
        absl::StrCat("block ", block, " of a cache that has ", cache_blocks, " blocks"));
  }
  return absl::OkStatus();
}

absl::Status KvJobs::save_layer(uint64_t number, uint32_t layer, uint32_t first_block,
                                absl::Span<const uint32_t> blocks) {
  KvSendJob* job = find(number);
  if (job == nullptr) return absl::NotFoundError(absl::StrCat("there is no job ", number));
  if (!is_wanted(number)) {
    const KvPush* push = job->pushes.empty() ? nullptr : job->pushes.front().get();
    return absl::CancelledError(absl::StrCat("job ", number, " is no longer wanted: ",
                                             push == nullptr   ? "no load came during its lease"
                                             : push->cancelled ? "decode cancelled it"
                                                               : push->why.message()));
  }
  if (job->finished) {
    return absl::FailedPreconditionError(absl::StrCat("job ", number, " is finished already"));
  }
  if (absl::Status status = check_blocks(*job, layer, first_block, blocks); !status.ok()) {
    return status;
  }
  for (size_t i = 0; i < blocks.size() && !job->pages.empty(); ++i) {
    uint32_t& page = job->pages[layer][first_block + i];
    if (page == KvRoute::kNotSaved) page = blocks[i];
  }
  for (const std::unique_ptr<KvPush>& push : job->pushes) {
    if (push->wanted) save(*push, layer, first_block, blocks);
  }
  return absl::OkStatus();
}

void KvJobs::save(KvPush& push, uint32_t layer, uint64_t first_block,
                  absl::Span<const uint32_t> blocks) {
  push.route.save(layer, first_block, blocks, [&](KvBlockRange run) {
    if (!options_.serialized && push.wanted) send_blocks(push, layer, run);
  });
}

void KvJobs::catch_up(KvPush& push) {
  KvSendJob& job = *push.job;
  for (uint32_t layer = 0; layer < job.pages.size() && push.wanted; ++layer) {
    save(push, layer, 0, job.pages[layer]);
  }
  if (job.finished && push.wanted) finish(push);
}

void KvJobs::finish_job(uint64_t number, const absl::Status& outcome) {
  KvSendJob* job = find(number);
  if (job == nullptr || job->finished) return;
  job->finished = true;
  job->outcome = outcome;
  for (const std::unique_ptr<KvPush>& push : job->pushes) {
    if (push->wanted) finish(*push);
  }
}

void KvJobs::finish(KvPush& push) {
  if (!push.job->outcome.ok()) return fail(push, push.job->outcome);
  const KvRoute& route = push.route;
  if (!route.all_saved()) {
    return fail(push, absl::InternalError(absl::StrCat("prefill finished with ",
                                                       route.pages.size() - route.saved, " of ",
                                                       route.pages.size(), " blocks missing")));
  }
  for (uint32_t l = 0; options_.serialized && l < route.layers.size() && push.wanted; ++l) {
    if (route.layers[l].blocks.count > 0) send_blocks(push, l, route.layers[l].blocks);
  }
  settle(push);
}

bool KvJobs::is_saved(uint64_t number) {
  KvSendJob* job = find(number);
  if (job == nullptr) return true;
  if (!job->finished || may_still_come(*job)) return false;
  for (const std::unique_ptr<KvPush>& push : job->pushes) {
    if (!push->over()) return false;
  }
  forget(*job);
  return true;
}

}  // namespace baton::kvtransfer
