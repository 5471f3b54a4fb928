// Rank 0 of a tensor-parallel model: tells the others what the engine computes.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/model/model.h"
#include "engine/shard/commands.h"
#include "engine/shard/group.h"
#include "engine/shard/limits.h"

namespace baton::engine::shard {

// The settings that all ranks of a model must share.
Settings settings_of(const Model& model, const StepLimits& limits, std::string_view role);

// One thread at a time: the engine's.
class Leader {
 public:
  // Blocks until all followers are ready; see Group::agree() for its errors. The group must outlive
  // the leader. `role` is any word that must be equal at all ranks.
  static absl::StatusOr<std::unique_ptr<Leader>> create(Group& group, const Model& model,
                                                        const StepLimits& limits,
                                                        std::string_view role = "all");
  // The followers' run() ends, if the group still works.
  ~Leader();
  Leader(const Leader&) = delete;
  Leader& operator=(const Leader&) = delete;

  // Called once, from the thread that finds out that the group has failed.
  void on_failure(std::function<void(const absl::Status&)> task) { on_failure_ = std::move(task); }

  ShardExchange& exchange() { return group_; }
  // The followers compute these chunks: whoever calls it calls Model::forward() with them next.
  absl::Status begin_step(std::span<const SequenceChunk> chunks);
  // How that ended.
  void end_step(const absl::Status& status);
  // While there is nothing to compute.
  void look() { note(group_.look()); }
  // OK until the group has failed.
  absl::Status status() const { return group_.status(); }

 private:
  explicit Leader(Group& group) : group_(group) {}
  absl::Status tell();
  void note(const absl::Status& status);

  Group& group_;
  Command command_;
  std::string bytes_;
  std::function<void(const absl::Status&)> on_failure_;
};

}  // namespace baton::engine::shard
