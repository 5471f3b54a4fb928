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
      followers_(leader.about_followers().size()),
      reported_(followers_) {
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
  reported_[follower] = report.kv.stats;
  for (const KvEvent& event : report.kv.events) {
    const auto load = loads_.find(event.id);
    const auto job = jobs_.find(event.id);
    const auto why = [&] {
      return absl::Status(event.why.code(),
                          absl::StrCat("rank ", follower + 1, ": ", event.why.message()));
    };
    switch (event.kind) {
      case KvEventKind::kLoaded:
        if (load != loads_.end()) ++load->second.here;
        break;
      case KvEventKind::kLoadFailed:
        if (load != loads_.end() && load->second.failure.ok()) load->second.failure = why();
        break;
      case KvEventKind::kLoadQuiet:
        if (load != loads_.end()) ++load->second.quiet;
        break;
      case KvEventKind::kUnwanted:
        if (job != jobs_.end() && job->second.unwanted.ok()) job->second.unwanted = why();
        break;
      case KvEventKind::kSaved:
        if (job != jobs_.end()) ++job->second.saved;
        break;
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
  loads_[call.id];
  leader_.call(std::move(call));
  return absl::OkStatus();
}

uint32_t RanksConnector::layers_loaded(kvtransfer::KvRequestId id) {
  const auto it = loads_.find(id);
  if (it == loads_.end() || it->second.here < followers_) return 0;
  return own_->layers_loaded(id) >= layers_ ? layers_ : 0;
}

absl::Status RanksConnector::load_status(kvtransfer::KvRequestId id) {
  const auto it = loads_.find(id);
  if (it == loads_.end()) return absl::NotFoundError(absl::StrCat("there is no load ", id));
  if (absl::Status status = leader_.status(); !status.ok()) return status;
  if (!it->second.failure.ok()) return it->second.failure;
  return own_->load_status(id);
}

absl::Status RanksConnector::wait_for_layer(kvtransfer::KvRequestId id, uint32_t layer) {
  while (layers_loaded(id) <= layer) {
    if (absl::Status status = load_status(id); !status.ok()) return status;
    wait(kTick, -1);
  }
  return absl::OkStatus();
}

bool RanksConnector::end_load(kvtransfer::KvRequestId id) {
  const auto it = loads_.find(id);
  if (it == loads_.end()) return true;
  Load& load = it->second;
  if (!std::exchange(load.ending, true)) {
    leader_.call({.kind = KvCallKind::kEndLoad, .id = id});
  }
  if (!load.own_quiet) load.own_quiet = own_->end_load(id);
  if (!load.own_quiet || !everywhere(load.quiet)) return false;
  loads_.erase(it);
  return true;
}

// --- prefill -------------------------------------------------------------------------------------

std::optional<kvtransfer::KvJob> RanksConnector::next_job() {
  while (std::optional<kvtransfer::KvJob> job = own_->next_job()) {
    if (job->key.empty()) {
      own_->finish_job(job->job, absl::FailedPreconditionError(absl::StrCat(
                                     "this prefill server has ", followers_ + 1,
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
  if (!it->second.own_saved || !everywhere(it->second.saved)) return false;
  jobs_.erase(it);
  return true;
}

}  // namespace baton::engine::shard
