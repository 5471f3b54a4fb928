// The KV tiers of a rank behind rank 0: do what rank 0's have them do, for this rank's heads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "engine/model/shard.h"
#include "engine/shard/loads.h"
#include "engine/shard/tier_ranks.h"
#include "kvtransfer/tiers/tier_store.h"

namespace baton::engine::shard {

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
