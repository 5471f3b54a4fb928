// A rank behind rank 0 of a tensor-parallel model: computes what it is told.
#pragma once

#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/handoff/hand_off.h"
#include "engine/kernels/compute_pool.h"
#include "engine/model/model.h"
#include "engine/shard/commands.h"
#include "engine/shard/group.h"
#include "engine/shard/kv_follower.h"
#include "engine/shard/leader.h"
#include "engine/shard/limits.h"

namespace baton::engine::shard {

struct FollowerOptions {
  StepLimits limits;              // as rank 0's
  std::string_view role = "all";  // likewise
  int threads = 1;                // that compute; 0: one per CPU
  // This rank's, where rank 0 has one: the engine's calls to it are repeated here (kv_ranks.h).
  // Must outlive the follower.
  handoff::HandOff* session = nullptr;
  RankTiers tiers;  // of this rank, where rank 0 has some; likewise (tier_ranks.h)
};

class Follower {
 public:
  // Blocks until all ranks are ready; see Group::agree() for its errors. The group and the model,
  // which is this rank's part, must outlive the follower.
  static absl::StatusOr<std::unique_ptr<Follower>> create(Group& group, const Model& model,
                                                          const FollowerOptions& options);
  ~Follower();

  // Follows until rank 0 ends (OK), or the group fails. What fails here ends the group.
  absl::Status run();

 private:
  Follower(Group& group, const Model& model, const FollowerOptions& options)
      : group_(group), model_(model), pool_(options.threads) {}
  absl::Status obey(const Command& command);
  absl::Status compute(const Command& command);

  Group& group_;
  const Model& model_;
  ComputePool pool_;
  std::optional<KvMemory> memory_;
  std::optional<Workspace> workspace_;
  handoff::HandOff* session_ = nullptr;
  std::optional<KvFollower> kv_;
  std::optional<TierFollower> tiers_;  // reads and writes the memory: gone before it
  std::vector<SequenceChunk> chunks_;
  std::vector<float> logits_;  // nothing reads them
};

}  // namespace baton::engine::shard
