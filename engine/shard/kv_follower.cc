// Making rank 0's calls, and finding out what has become of them.
#include "engine/shard/kv_follower.h"

#include <utility>

namespace baton::engine::shard {

void KvFollower::make(const KvCall& call) {
  if (call.kind == KvCallKind::kEndLoad) {
    loads_[call.id].ended = true;
    return;
  }
  if (call.kind == KvCallKind::kOpen) {
    sends_[call.id] = session_.open(call.transfer.transfer, call.tokens);
    return;
  }
  if (call.kind == KvCallKind::kStartLoad) {
    if (call.blocks.empty()) return session_.decline(call.transfer);
    kvtransfer::KvLoad load;
    load.id = call.id;
    load.transfer = call.transfer;
    for (const auto& [agent, address] : call.workers) {
      load.transfer->workers.push_back({agent, address});
    }
    load.tokens.resize(call.tokens);
    load.first_token = call.first_token;
    load.blocks = call.blocks;
    load.timeout = call.timeout;
    load.silence = call.silence;
    load.push = call.push;
    FollowedLoad& followed = loads_[call.id];
    followed.number = call.id;
    const absl::Status status = session_.start_load(std::move(load));
    if (status.ok()) return;
    followed.told = true;
    events_.push_back({EventKind::kLoadFailed, call.id, status});
    return;
  }
  const auto send = sends_.find(call.id);
  if (send == sends_.end()) return;
  if (call.kind == KvCallKind::kRestart) return session_.restart(send->second);
  if (send->second == 0) {  // nothing reads it here
    events_.push_back({EventKind::kReleased, call.id});
    sends_.erase(send);
  } else if (call.kind == KvCallKind::kDrop) {
    session_.drop(send->second);
    sends_.erase(send);
  } else if (call.kind == KvCallKind::kHold) {
    session_.hold(send->second);
  } else {
    session_.fail(send->second, call.why);
  }
}

void KvFollower::kv_written(int layer) {
  for (const Command::Send& said : step_->sends) {
    const auto send = sends_.find(said.id);
    if (send == sends_.end() || said.chunk >= step_->chunks.size()) continue;
    session_.computed(send->second, static_cast<uint32_t>(layer), said.tokens,
                      step_->chunks[said.chunk].blocks);
  }
}

void KvFollower::report(Report& report) {
  session_.progress();
  follow_loads(session_, layers_, loads_, events_);
  for (const uint64_t number : session_.released()) {
    absl::erase_if(sends_, [&](const auto& entry) {
      if (entry.second != number) return false;
      events_.push_back({EventKind::kReleased, entry.first});
      return true;
    });
  }
  report.take(events_, report.kv_events);
}

}  // namespace baton::engine::shard
