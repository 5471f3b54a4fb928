// Making rank 0's calls of KV tiers, and finding out what has become of them.
#include "engine/shard/tier_follower.h"

#include <utility>

namespace baton::engine::shard {

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
