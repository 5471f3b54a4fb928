// Following rank 0, step by step.
#include "engine/shard/follower.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/shard/leader.h"
#include "engine/shard/tier_ranks.h"

namespace baton::engine::shard {
absl::StatusOr<std::unique_ptr<Follower>> Follower::create(Group& group, const Model& model,
                                                           const FollowerOptions& options) {
  if (group.shard() != model.shard() || group.shard().rank == 0) {
    return absl::InvalidArgumentError("a follower is not rank 0, and has its own rank's part");
  }
  std::unique_ptr<Follower> follower(new Follower(group, model, options));
  absl::StatusOr<KvMemory> memory =
      KvMemory::make(model, options.limits.blocks, nullptr, options.session != nullptr);
  if (!memory.ok()) return memory.status();
  follower->memory_ = *std::move(memory);
  absl::StatusOr<Workspace> workspace =
      model.make_workspace(options.limits.workspace(model), follower->pool_, &group);
  if (!workspace.ok()) return workspace.status();
  follower->workspace_ = *std::move(workspace);
  follower->logits_.resize(options.limits.max_sequences * size_t(model.config().vocab_size));
  std::string address;
  if (options.session != nullptr) {
    const absl::Status used = options.session->use_cache(follower->memory_->cache(), std::nullopt,
                                                         follower->memory_->file());
    if (!used.ok()) return used;
    follower->session_ = options.session;
    follower->kv_.emplace(*options.session, static_cast<uint32_t>(model.config().num_layers));
    address = options.session->agent()->address();
  }
  if (options.tiers.has_value()) {
    auto store = open_tiers(options.tiers->store, follower->memory_->cache());
    if (!store.ok()) return store.status();
    follower->tiers_.emplace(*std::move(store), group.shard(),
                             static_cast<uint32_t>(model.config().num_layers));
  }
  absl::StatusOr<std::vector<std::string>> agreed =
      group.agree(settings_of(model, options.limits, options.role, options.tiers), address);
  if (!agreed.ok()) return agreed.status();
  return follower;
}

Follower::~Follower() {
  if (session_ != nullptr) session_->close();  // it reads and writes the cache
}

absl::Status Follower::run() {
  for (;;) {
    const absl::StatusOr<std::string_view> message = group_.receive();
    if (!message.ok()) return message.status();
    const absl::StatusOr<Command> command =
        base::read_fields<Command>(*message, "a command of rank 0");
    absl::Status status = command.status();
    if (status.ok()) {
      if (command->kind == CommandKind::kStop) return absl::OkStatus();
      status = obey(*command);
    }
    if (status.ok()) continue;
    if (group_.status().ok()) group_.abort(status);
    return status;
  }
}

absl::Status Follower::obey(const Command& command) {
  if ((!kv_.has_value() && !command.calls.empty()) ||
      (!tiers_.has_value() && !command.tier_calls.empty())) {
    return absl::InternalError(absl::StrCat("rank 0 has ",
                                            command.calls.empty() ? "KV tiers" : "a KV session",
                                            ", but this rank has none"));
  }
  for (const KvCall& call : command.calls) kv_->make(call);
  for (const TierCall& call : command.tier_calls) tiers_->make(call);
  if (command.kind == CommandKind::kStep) return compute(command);
  Report report;
  if (kv_.has_value()) kv_->report(report);
  if (tiers_.has_value()) tiers_->report(report);
  std::string bytes;
  base::write_fields(report, bytes);
  return group_.exchange(bytes).status();
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
  LayerHook none;
  if (kv_.has_value()) kv_->begin_step(command);
  LayerHook& hook = kv_.has_value() ? static_cast<LayerHook&>(*kv_) : none;
  return model_.forward(chunks_, memory_->cache(), hook, *workspace_, logits_.data());
}

}  // namespace baton::engine::shard

namespace baton::base {
template absl::StatusOr<engine::shard::Command> read_fields<engine::shard::Command>(
    std::string_view, std::string_view);
template absl::StatusOr<engine::shard::Report> read_fields<engine::shard::Report>(std::string_view,
                                                                                  std::string_view);
template void write_fields<engine::shard::Command>(const engine::shard::Command&, std::string&);
template void write_fields<engine::shard::Report>(const engine::shard::Report&, std::string&);
}  // namespace baton::base
