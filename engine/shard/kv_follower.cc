// Making rank 0's calls, and finding out what has become of them.
#include "engine/shard/kv_follower.h"

#include <utility>

namespace baton::engine::shard {

void KvFollower::make(const KvCall& call) {
  switch (call.kind) {
    case KvCallKind::kStartLoad:
      return start_load(call);
    case KvCallKind::kEndLoad:
      loads_[call.id].ended = true;
      return;
    case KvCallKind::kOpenJob:
      return open_job(call);
    case KvCallKind::kRenewJob:
      if (const auto it = jobs_.find(call.id); it != jobs_.end() && it->second.number != 0) {
        connector_.renew_job(it->second.number, call.binding.lease).IgnoreError();
      }
      return;
    case KvCallKind::kSave:
      for (uint32_t layer = 0; layer < call.layers; ++layer) {
        save(call.id, call.first_layer + layer, call.first_block, call.blocks);
      }
      return;
    case KvCallKind::kFinishJob:
      return finish_job(call);
  }
}

void KvFollower::start_load(const KvCall& call) {
  FollowedLoad& load = loads_[call.id];
  load.number = call.id;
  kvtransfer::KvLoad asked = call.load;
  asked.id = call.id;
  const absl::Status status = connector_.start_load(std::move(asked));
  if (status.ok()) return;
  load.told = true;
  events_.push_back({EventKind::kLoadFailed, call.id, status});
}

// Takes what the connector has been asked for: rank 0 may hear of it before or after this rank.
void KvFollower::take_jobs() {
  while (std::optional<kvtransfer::KvJob> job = connector_.next_job()) {
    if (!job->key.empty()) {
      unclaimed_[job->key] = job->job;
      continue;
    }
    connector_.finish_job(job->job,
                          absl::FailedPreconditionError(
                              "this worker is one of several tensor-parallel ranks: give the "
                              "address of all, as /v1/baton/address of the server says"));
    closing_.push_back(job->job);
  }
}

void KvFollower::open_job(const KvCall& call) {
  Job& job = jobs_[call.id];
  take_jobs();
  if (const auto it = unclaimed_.find(call.binding.key); it != unclaimed_.end()) {
    job.number = it->second;
    unclaimed_.erase(it);
    return;
  }
  const absl::StatusOr<uint64_t> number = connector_.bind(call.binding);
  if (number.ok()) {
    job.number = *number;
  } else {
    unwanted(call.id, job, number.status());
  }
}

void KvFollower::finish_job(const KvCall& call) {
  Job& job = jobs_[call.id];
  job.finished = true;
  if (job.number != 0) connector_.finish_job(job.number, call.outcome);
}

void KvFollower::unwanted(uint64_t id, Job& job, const absl::Status& why) {
  if (!std::exchange(job.told, true)) events_.push_back({EventKind::kUnwanted, id, why});
}

void KvFollower::save(uint64_t id, uint32_t layer, uint32_t first_block,
                      const std::vector<uint32_t>& blocks) {
  const auto it = jobs_.find(id);
  if (it == jobs_.end() || it->second.number == 0) return;
  const absl::Status status = connector_.save_layer(it->second.number, layer, first_block, blocks);
  if (!status.ok()) unwanted(id, it->second, status);
}

absl::Status KvFollower::before_layer(int) {
  connector_.progress();
  return absl::OkStatus();
}

void KvFollower::kv_written(int layer) {
  for (const Command::Send& send : *sends_) {
    save(send.job, static_cast<uint32_t>(layer), send.first_block, send.blocks);
  }
  connector_.progress();
}

void KvFollower::progress() {
  connector_.progress();
  follow();
}

void KvFollower::wait(Time timeout) {
  connector_.wait(timeout, -1);
  follow();
}

void KvFollower::follow() {
  follow_loads(connector_, layers_, loads_, events_);
  follow_jobs();
}

void KvFollower::follow_jobs() {
  take_jobs();
  absl::erase_if(jobs_, [this](auto& entry) {
    auto& [id, job] = entry;
    if (job.finished) {
      if (job.number != 0 && !connector_.is_saved(job.number)) return false;
      events_.push_back({EventKind::kSaved, id});
      return true;
    }
    if (job.number != 0 && !job.told && !connector_.is_wanted(job.number)) {
      unwanted(id, job, absl::CancelledError("the decode worker cancelled the request"));
    }
    return false;
  });
  // Rank 0 was never asked for these, or has refused them.
  absl::erase_if(unclaimed_, [this](const auto& entry) {
    if (connector_.is_wanted(entry.second)) return false;
    connector_.finish_job(entry.second, absl::CancelledError("no request needs it now"));
    closing_.push_back(entry.second);
    return true;
  });
  std::erase_if(closing_, [this](uint64_t job) { return connector_.is_saved(job); });
}

void KvFollower::report(Report& report) {
  progress();
  report.kv = connector_.stats();
  report.take(events_, report.kv_events);
}

}  // namespace baton::engine::shard
