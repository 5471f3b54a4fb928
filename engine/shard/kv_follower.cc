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

using kvtransfer::tiers::TierFound;
using kvtransfer::tiers::TierSave;

void TierFollower::make(const TierCall& call) {
  switch (call.kind) {
    case TierCallKind::kFind:
      questions_.emplace_back(call.id, names_.of(call.keys));
      return;
    case TierCallKind::kSave:
      return save(call);
    case TierCallKind::kLoad:
      loads_[call.id].number = store_->load(names_.of(call.keys), call.blocks, call.timeout);
      return;
    case TierCallKind::kEndLoad:
      loads_[call.id].ended = true;
      return;
    case TierCallKind::kFlush:
      return store_->flush();
  }
}

// What the store does not take is lost here: this rank then misses what another has.
void TierFollower::save(const TierCall& call) {
  const TierSave save{names_.of(call.keys[0]), call.blocks[0]};
  if (store_->save(std::span(&save, 1)) == 1) {
    saves_[save.block].push_back(call.id);
  } else {
    events_.push_back({.kind = EventKind::kUnpinned, .id = call.id});
  }
}

void TierFollower::follow_questions() {
  while (!questions_.empty()) {
    const auto& [id, keys] = questions_.front();
    const TierFound found = store_->is_on() ? store_->find(keys) : TierFound{};
    if (found.pending) return;
    events_.push_back({.kind = EventKind::kFound, .id = id, .found = found});
    questions_.pop_front();
  }
}

void TierFollower::follow_saves() {
  for (const uint32_t block : store_->unpinned()) {
    const auto it = saves_.find(block);
    if (it == saves_.end()) continue;
    events_.push_back({.kind = EventKind::kUnpinned, .id = it->second.front()});
    it->second.pop_front();
    if (it->second.empty()) saves_.erase(it);
  }
}

void TierFollower::report(Report& report) {
  follow_questions();
  follow_saves();
  follow_loads(*store_, layers_, loads_, events_);
  report.tiers = store_->stats();
  report.take(events_, report.tier_events);
}

}  // namespace baton::engine::shard
