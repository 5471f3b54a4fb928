// A rank behind rank 0 of a tensor-parallel model: computes what it is told.
#pragma once

#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/kernels/compute_pool.h"
#include "engine/model/model.h"
#include "engine/shard/commands.h"
#include "engine/shard/group.h"
#include "engine/shard/kv_follower.h"
#include "engine/shard/leader.h"
#include "engine/shard/limits.h"
#include "engine/shard/tier_follower.h"
#include "kvtransfer/kv_connector.h"
#include "transport/clock.h"

namespace baton::engine::shard {

struct FollowerOptions {
  StepLimits limits;              // as rank 0's
  std::string_view role = "all";  // likewise
  int threads = 1;                // that compute; 0: one per CPU
  // This rank's, where rank 0 has one: the engine's calls to it are repeated here (kv_ranks.h).
  // Must outlive the follower.
  kvtransfer::KvConnector* connector = nullptr;
  RankTiers tiers;  // of this rank, where rank 0 has some; likewise (tier_ranks.h)
};

class Follower {
 public:
  // Blocks until all ranks are ready; see Group::agree() for its errors. The group and the model,
  // which is this rank's part, must outlive the follower.
  static absl::StatusOr<std::unique_ptr<Follower>> create(Group& group, const Model& model,
                                                          const FollowerOptions& options);

  // Follows until rank 0 ends (OK), or the group fails. What fails here ends the group.
  absl::Status run();

 private:
  Follower(Group& group, const Model& model, const FollowerOptions& options)
      : group_(group), model_(model), pool_(options.threads) {}
  absl::Status obey(const Command& command);
  absl::Status compute(const Command& command);
  bool idle();

  Group& group_;
  const Model& model_;
  ComputePool pool_;
  std::optional<KvMemory> memory_;
  std::optional<Workspace> workspace_;
  std::optional<KvFollower> kv_;
  std::optional<TierFollower> tiers_;  // reads and writes the memory: gone before it
  Time heard_{};                       // of rank 0
  std::vector<SequenceChunk> chunks_;
  std::vector<float> logits_;  // nothing reads them
};

}  // namespace baton::engine::shard
