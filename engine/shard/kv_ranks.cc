// One connector of many: calls go to all ranks, answers are what all of them say.
#include "engine/shard/kv_ranks.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/shard/kv_address.h"

namespace baton::engine::shard {
namespace {

constexpr Time kAskEvery = std::chrono::microseconds(500);
constexpr Time kTick = std::chrono::milliseconds(1);

}  // namespace

absl::StatusOr<std::unique_ptr<RanksConnector>> RanksConnector::create(
    Leader& leader, std::unique_ptr<kvtransfer::KvConnector> own) {
  std::unique_ptr<RanksConnector> connector(new RanksConnector(leader, std::move(own)));
  std::vector<std::string> addresses = leader.about_followers();
  for (size_t i = 0; i < addresses.size(); ++i) {
    if (!addresses[i].empty()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", i + 1,
                     " has no KV connector, and rank 0 has one: give each rank one "
                     "(FollowerOptions::connector)"));
  }
  addresses.insert(addresses.begin(), connector->own_->address());
  connector->address_ = join_kv_addresses(addresses);
  return connector;
}

RanksConnector::RanksConnector(Leader& leader, std::unique_ptr<kvtransfer::KvConnector> own)
    : leader_(leader),
      own_(std::move(own)),
      loads_(leader, *own_),
      reported_(leader.about_followers().size()) {
  leader_.join(this);
}

absl::StatusOr<void*> RanksConnector::allocate_cache(const kvtransfer::KvLayout& layout) {
  layers_ = layout.layers();
  return own_->allocate_cache(layout);
}

kvtransfer::KvConnectorStats RanksConnector::stats() const {
  kvtransfer::KvConnectorStats sum = own_->stats();
  for (const kvtransfer::KvConnectorStats& each : reported_) {
    sum.bytes_sent += each.bytes_sent;
    sum.bytes_loaded += each.bytes_loaded;
    sum.loads_failed += each.loads_failed;
    sum.jobs_failed += each.jobs_failed;
  }
  return sum;
}

void RanksConnector::progress() {
  own_->progress();
  std::erase_if(refused_, [this](uint64_t job) { return own_->is_saved(job); });
  leader_.progress();
}

void RanksConnector::wait(Time timeout, int fd) {
  own_->wait(busy() ? std::min(timeout, kTick) : timeout, fd);
  progress();
}

Time RanksConnector::patience() const {
  return loads_.empty() && jobs_.empty() ? kNever : kAskEvery;
}

void RanksConnector::hear(size_t follower, const Report& report) {
  reported_[follower] = report.kv;
  for (const Event& event : report.kv_events) {
    loads_.hear(follower, event);
    const auto job = jobs_.find(event.id);
    if (job == jobs_.end()) continue;
    if (event.kind == EventKind::kSaved) ++job->second.saved;
    if (event.kind == EventKind::kUnwanted && job->second.unwanted.ok()) {
      job->second.unwanted = said_by(follower, event.why);
    }
  }
}

// --- decode --------------------------------------------------------------------------------------

absl::Status RanksConnector::start_load(kvtransfer::KvLoad load) {
  if (absl::Status status = leader_.status(); !status.ok()) return status;
  if (load.key.empty()) {
    return absl::InvalidArgumentError("a load by several ranks needs a key");
  }
  KvCall call{.kind = KvCallKind::kStartLoad, .id = load.id, .load = load};
  if (absl::Status status = own_->start_load(std::move(load)); !status.ok()) return status;
  loads_.start(call.id, call.id);
  leader_.call(std::move(call));
  return absl::OkStatus();
}

absl::Status RanksConnector::wait_for_layer(kvtransfer::KvRequestId id, uint32_t layer) {
  while (layers_loaded(id) <= layer) {
    if (absl::Status status = load_status(id); !status.ok()) return status;
    wait(kTick, -1);
  }
  return absl::OkStatus();
}

bool RanksConnector::end_load(kvtransfer::KvRequestId id) {
  return loads_.end(id, [&] { leader_.call({.kind = KvCallKind::kEndLoad, .id = id}); });
}

// --- prefill -------------------------------------------------------------------------------------

std::optional<kvtransfer::KvJob> RanksConnector::next_job() {
  while (std::optional<kvtransfer::KvJob> job = own_->next_job()) {
    if (job->key.empty()) {
      own_->finish_job(job->job, absl::FailedPreconditionError(absl::StrCat(
                                     "this prefill server has ", reported_.size() + 1,
                                     " tensor-parallel ranks: give the address of all, as its "
                                     "/v1/baton/address says")));
      refused_.push_back(job->job);
      continue;
    }
    jobs_[job->job];
    KvCall call{.kind = KvCallKind::kOpenJob, .id = job->job};
    call.binding.key = job->key;
    call.binding.tokens = static_cast<uint32_t>(job->tokens.size());
    call.binding.loads = job->loads_of_key;
    leader_.call(std::move(call));
    return job;
  }
  return std::nullopt;
}

bool RanksConnector::is_wanted(uint64_t job) {
  const auto it = jobs_.find(job);
  return it != jobs_.end() && it->second.unwanted.ok() && leader_.status().ok() &&
         own_->is_wanted(job);
}

absl::Status RanksConnector::save_layer(uint64_t job, uint32_t layer, uint32_t first_block,
                                        absl::Span<const uint32_t> blocks) {
  absl::Status status = own_->save_layer(job, layer, first_block, blocks);
  if (leader_.in_step() || !status.ok()) return status;
  KvCall* last = leader_.last_call();
  const bool next = last != nullptr && last->kind == KvCallKind::kSave && last->id == job &&
                    last->first_layer + last->layers == layer && last->first_block == first_block &&
                    absl::MakeConstSpan(last->blocks) == blocks;
  if (next) {
    ++last->layers;
    return status;
  }
  KvCall call{.kind = KvCallKind::kSave, .id = job};
  call.first_layer = layer;
  call.layers = 1;
  call.first_block = first_block;
  call.blocks.assign(blocks.begin(), blocks.end());
  leader_.call(std::move(call));
  return status;
}

absl::Status RanksConnector::renew_job(uint64_t job, Time lease) {
  if (jobs_.contains(job)) {
    KvCall call{.kind = KvCallKind::kRenewJob, .id = job};
    call.binding.lease = lease;
    leader_.call(std::move(call));
  }
  return own_->renew_job(job, lease);
}

void RanksConnector::finish_job(uint64_t job, const absl::Status& outcome) {
  own_->finish_job(job, outcome);
  if (jobs_.contains(job)) {
    leader_.call({.kind = KvCallKind::kFinishJob, .id = job, .outcome = outcome});
  }
}

bool RanksConnector::is_saved(uint64_t job) {
  const auto it = jobs_.find(job);
  if (it == jobs_.end()) return own_->is_saved(job);
  if (!it->second.own_saved) it->second.own_saved = own_->is_saved(job);
  if (!it->second.own_saved || !leader_.everywhere(it->second.saved)) return false;
  jobs_.erase(it);
  return true;
}

}  // namespace baton::engine::shard
