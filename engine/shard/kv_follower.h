// The KV session of a rank behind rank 0: does what rank 0's has it do, for this rank's heads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "engine/model/model.h"
#include "engine/model/shard.h"
#include "engine/shard/commands.h"
#include "engine/shard/loads.h"
#include "engine/shard/tier_ranks.h"
#include "kvtransfer/kv_session.h"
#include "kvtransfer/tiers/tier_store.h"

namespace baton::engine::shard {

// As a LayerHook it says what a step computes. The follower's thread calls everything.
class KvFollower : public LayerHook {
 public:
  // `session` must outlive this object; its cache has `layers` layers.
  KvFollower(kvtransfer::KvSession& session, uint32_t layers)
      : session_(session), layers_(layers) {}

  void make(const KvCall& call);
  // What the next step computes; must outlive the step.
  void begin_step(const Command& step) { step_ = &step; }
  void kv_written(int layer) override;
  // Adds what has changed since the last one.
  void report(Report& report);

 private:
  kvtransfer::KvSession& session_;
  const uint32_t layers_;
  const Command* step_ = nullptr;
  FollowedLoads loads_;
  absl::flat_hash_map<uint64_t, uint64_t> sends_;  // by rank 0's number; 0: this rank has none
  std::deque<Event> events_;
};

// The KV tiers of a rank behind rank 0: do what rank 0's have them do, for this rank's heads.

// The follower's thread calls everything; threads of the store's do the work.
class TierFollower {
 public:
  // `layers` of the store's cache.
  TierFollower(std::unique_ptr<kvtransfer::tiers::TierStore> store, const ModelShard& shard,
               uint32_t layers)
      : store_(std::move(store)), names_(shard), layers_(layers) {}

  void make(const TierCall& call);
  // Adds what has changed since the last one.
  void report(Report& report);

 private:
  void save(const TierCall& call);
  void follow_questions();
  void follow_saves();

  const std::unique_ptr<kvtransfer::tiers::TierStore> store_;
  const RankKeys names_;
  const uint32_t layers_;
  // By rank 0's numbers, in whose order what is asked is answered.
  std::deque<std::pair<uint64_t, std::vector<kvtransfer::tiers::TierKey>>> questions_;
  absl::flat_hash_map<uint32_t, std::deque<uint64_t>> saves_;  // by block
  FollowedLoads loads_;
  std::deque<Event> events_;
};

}  // namespace baton::engine::shard
