// Rank 0 of a tensor-parallel model: tells the others what the engine computes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/model/model.h"
#include "engine/shard/commands.h"
#include "engine/shard/group.h"
#include "engine/shard/kv_calls.h"
#include "engine/shard/limits.h"

namespace baton::engine::shard {

// Blocks of a job that a step completes, in every layer: [first_block, ...) of its sequence.
struct StepSend {
  uint64_t job = 0;
  uint32_t first_block = 0;
  absl::Span<const uint32_t> blocks;
};

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
  // The followers compute these chunks, and send what they complete: whoever calls it calls
  // Model::forward() with the chunks next.
  absl::Status begin_step(std::span<const SequenceChunk> chunks,
                          std::span<const StepSend> sends = {});
  // How that ended.
  void end_step(const absl::Status& status);
  bool in_step() const { return in_step_; }

  // What each follower said of itself, from rank 1 on: its KV address, "" without a connector.
  const std::vector<std::string>& about_followers() const { return about_followers_; }
  // For the connector (kv_ranks.h): the followers' connectors make the call, after all earlier
  // ones, when the next step begins or sync() is called.
  void call(KvCall call) { command_.calls.push_back(std::move(call)); }
  bool has_calls() const { return !command_.calls.empty(); }
  // The last that they have not been told of; null: they know all.
  KvCall* last_call() { return has_calls() ? &command_.calls.back() : nullptr; }
  // Outside a step: they make the calls, and report what has changed at each, from rank 1 on.
  absl::StatusOr<std::vector<KvReport>> sync();

  // While there is nothing to compute.
  void look() { note(group_.look()); }
  // OK until the group has failed.
  absl::Status status() const { return group_.status(); }

 private:
  Leader(Group& group, std::vector<std::string> about_followers)
      : group_(group), about_followers_(std::move(about_followers)) {}
  absl::Status tell(CommandKind kind);
  void note(const absl::Status& status);

  Group& group_;
  const std::vector<std::string> about_followers_;
  bool in_step_ = false;
  Command command_;
  std::string bytes_;
  std::function<void(const absl::Status&)> on_failure_;
};

}  // namespace baton::engine::shard
