// Following rank 0, step by step.
#include "engine/shard/follower.h"

#include <utility>

#include "engine/shard/leader.h"

namespace baton::engine::shard {

absl::StatusOr<std::unique_ptr<Follower>> Follower::create(Group& group, const Model& model,
                                                           FollowerOptions options) {
  if (group.shard() != model.shard() || group.shard().rank == 0) {
    return absl::InvalidArgumentError("a follower is not rank 0, and has its own rank's part");
  }
  std::unique_ptr<Follower> follower(new Follower(group, model, options));
  absl::StatusOr<KvMemory> memory = KvMemory::make(model, options.limits.blocks, nullptr);
  if (!memory.ok()) return memory.status();
  follower->memory_ = *std::move(memory);
  absl::StatusOr<Workspace> workspace =
      model.make_workspace(options.limits.workspace(model), follower->pool_, &group);
  if (!workspace.ok()) return workspace.status();
  follower->workspace_ = *std::move(workspace);
  follower->logits_.resize(options.limits.max_sequences * size_t(model.config().vocab_size));
  absl::StatusOr<std::vector<std::string>> agreed =
      group.agree(settings_of(model, options.limits, options.role));
  if (!agreed.ok()) return agreed.status();
  return follower;
}

absl::Status Follower::run() {
  for (;;) {
    const absl::StatusOr<std::string_view> message = group_.receive();
    if (!message.ok()) return message.status();
    const absl::StatusOr<Command> command = Command::decode(*message);
    absl::Status status = command.status();
    if (status.ok()) {
      if (command->kind == CommandKind::kStop) return absl::OkStatus();
      status = compute(*command);
    }
    if (status.ok()) continue;
    if (group_.status().ok()) group_.abort(status);
    return status;
  }
}

absl::Status Follower::compute(const Command& command) {
  chunks_.clear();
  for (const Command::Chunk& chunk : command.chunks) {
    chunks_.push_back({.tokens = chunk.tokens,
                       .position = chunk.position,
                       .block_table = chunk.blocks,
                       .wants_logits = chunk.wants_logits,
                       .wants_all_logits = chunk.wants_all_logits});
  }
  LayerHook hook;
  return model_.forward(chunks_, memory_->cache(), hook, *workspace_, logits_.data());
}

}  // namespace baton::engine::shard
