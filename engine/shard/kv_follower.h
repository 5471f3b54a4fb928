// The KV session of a rank behind rank 0: does what rank 0's has it do, for this rank's heads.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "engine/model/model.h"
#include "engine/shard/commands.h"
#include "engine/shard/loads.h"
#include "kvtransfer/kv_session.h"

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

}  // namespace baton::engine::shard
