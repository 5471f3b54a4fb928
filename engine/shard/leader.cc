// Telling the followers, and noticing that they are gone.
#include "engine/shard/leader.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace baton::engine::shard {

Settings settings_of(const Model& model, const StepLimits& limits, std::string_view role) {
  return {{"the model (weights and arithmetic)", model.fingerprint()},
          {"--tensor-parallel-size", absl::StrCat(model.shard().ranks)},
          {"--blocks", absl::StrCat(limits.blocks)},
          {"--token-budget", absl::StrCat(limits.token_budget)},
          {"--max-seqs", absl::StrCat(limits.max_sequences)},
          {"--role", std::string(role)}};
}

absl::StatusOr<std::unique_ptr<Leader>> Leader::create(Group& group, const Model& model,
                                                       const StepLimits& limits,
                                                       std::string_view role) {
  if (group.shard() != model.shard() || group.shard().rank != 0) {
    return absl::InvalidArgumentError("the leader is rank 0, with the model's part of rank 0");
  }
  absl::StatusOr<std::vector<std::string>> agreed = group.agree(settings_of(model, limits, role));
  if (!agreed.ok()) return agreed.status();
  agreed->erase(agreed->begin());
  return std::unique_ptr<Leader>(new Leader(group, *std::move(agreed)));
}

Leader::~Leader() {
  if (!group_.status().ok()) return;
  tell(CommandKind::kStop).IgnoreError();
}

absl::Status Leader::tell(CommandKind kind) {
  command_.kind = kind;
  command_.encode(bytes_);
  command_.calls.clear();
  return group_.tell(bytes_);
}

void Leader::note(const absl::Status& status) {
  if (status.ok() || !on_failure_) return;
  std::exchange(on_failure_, nullptr)(status);
}

absl::Status Leader::begin_step(std::span<const SequenceChunk> chunks,
                                std::span<const StepSend> sends) {
  command_.chunks.resize(chunks.size());
  for (size_t i = 0; i < chunks.size(); ++i) {
    const SequenceChunk& from = chunks[i];
    Command::Chunk& to = command_.chunks[i];
    to.tokens.assign(from.tokens.begin(), from.tokens.end());
    to.position = from.position;
    to.blocks.assign(from.block_table.begin(), from.block_table.end());
    to.wants_logits = from.wants_logits;
    to.wants_all_logits = from.wants_all_logits;
  }
  command_.sends.resize(sends.size());
  for (size_t i = 0; i < sends.size(); ++i) {
    const StepSend& from = sends[i];
    Command::Send& to = command_.sends[i];
    to.job = from.job;
    to.first_block = from.first_block;
    to.blocks.assign(from.blocks.begin(), from.blocks.end());
  }
  absl::Status status = tell(CommandKind::kStep);
  note(status);
  in_step_ = status.ok();
  return status;
}

void Leader::end_step(const absl::Status& status) {
  // A step that fails here alone would leave the others in it: none of them can go on.
  if (!status.ok() && group_.status().ok()) group_.abort(status);
  note(status);
  in_step_ = false;
}

absl::StatusOr<std::vector<KvReport>> Leader::sync() {
  absl::Status status = tell(CommandKind::kSync);
  absl::StatusOr<std::string_view> bytes;
  if (status.ok()) {
    bytes = group_.exchange(std::string(KvReport::kBytes, '\0'));
    status = bytes.status();
  }
  std::vector<KvReport> reports;
  for (size_t i = 1; status.ok() && i <= about_followers_.size(); ++i) {
    auto report = KvReport::decode(bytes->substr(i * KvReport::kBytes, KvReport::kBytes));
    status = report.status();
    if (status.ok()) reports.push_back(*std::move(report));
  }
  if (status.ok()) return reports;
  if (group_.status().ok()) group_.abort(status);
  note(status);
  return status;
}

}  // namespace baton::engine::shard
