// Telling the followers, and noticing that they are gone.
#include "engine/shard/leader.h"

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "kvtransfer/tiers/tier_record.h"

namespace baton::engine::shard {
namespace {

std::string in_words(const RankTiers& tiers) {
  if (!tiers.has_value()) return "none";
  const kvtransfer::tiers::TierStoreOptions& store = tiers->store;
  return absl::StrCat("of each rank ", store.host_bytes, " bytes in memory, ",
                      store.disk.empty() ? 0 : store.disk_bytes, " on disk, ",
                      store.peer != nullptr ? "a" : "no", " store");
}

// Whoever knows a salt finds what is kept under it: logs have a digest.
std::string digest_of_salt(const RankTiers& tiers) {
  if (!tiers.has_value() || tiers->salt.empty()) return "none";
  const kvtransfer::tiers::TierKey key = kvtransfer::tiers::TierKeys({.weights = "",
                                                                      .tokenizer = "",
                                                                      .dtype = "",
                                                                      .layout = "",
                                                                      .shard = "",
                                                                      .adapter = "",
                                                                      .salt = tiers->salt})
                                             .key("");
  return absl::StrCat("one with the digest ",
                      absl::BytesToHexString(
                          absl::string_view(reinterpret_cast<const char*>(key.bytes.data()), 4)));
}

}  // namespace

Settings settings_of(const Model& model, const StepLimits& limits, std::string_view role,
                     const RankTiers& tiers) {
  return {{"the version of Baton's commands between ranks", absl::StrCat(kCommandsVersion)},
          {"the model (weights and arithmetic)", model.fingerprint()},
          {"--tensor-parallel-size", absl::StrCat(model.shard().ranks)},
          {"--enable-expert-parallel", model.shard().expert_parallel ? "yes" : "no"},
          {"--blocks", absl::StrCat(limits.blocks)},
          {"--token-budget", absl::StrCat(limits.token_budget)},
          {"--max-seqs", absl::StrCat(limits.max_sequences)},
          {"--role", std::string(role)},
          {"KV tiers (--kv-host-mib, --kv-disk, --kv-disk-gib, --kv-store)", in_words(tiers)},
          {"--kv-salt", digest_of_salt(tiers)}};
}

absl::StatusOr<std::unique_ptr<Leader>> Leader::create(Group& group, const Model& model,
                                                       const StepLimits& limits,
                                                       std::string_view role,
                                                       const RankTiers& tiers) {
  if (group.shard() != model.shard() || group.shard().rank != 0) {
    return absl::InvalidArgumentError("the leader is rank 0, with the model's part of rank 0");
  }
  absl::StatusOr<std::vector<std::string>> agreed =
      group.agree(settings_of(model, limits, role, tiers));
  if (!agreed.ok()) return agreed.status();
  agreed->erase(agreed->begin());
  return std::unique_ptr<Leader>(new Leader(group, *std::move(agreed), tiers.has_value()));
}

Leader::~Leader() {
  if (!group_.status().ok()) return;
  tell(CommandKind::kStop).IgnoreError();
}

absl::Status Leader::tell(CommandKind kind) {
  command_.kind = kind;
  bytes_.clear();
  base::write_fields(command_, bytes_);
  command_.calls.clear();
  command_.tier_calls.clear();
  urgent_ = false;
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
    command_.sends[i] = {sends[i].id, sends[i].tokens, sends[i].chunk};
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

void Leader::progress() {
  if (in_step_ || !group_.status().ok()) return;
  Time patience = urgent_ ? Time{} : kNever;
  for (const Part* part : parts_) patience = std::min(patience, part->patience());
  if (patience == kNever || Clock::steady().now() - asked_at_ < patience) return;
  ask().IgnoreError();  // it has been noted
}

absl::Status Leader::ask() {
  bool more = true;
  while (more) {
    const absl::StatusOr<std::vector<Report>> reports = sync();
    if (!reports.ok()) return reports.status();
    more = false;
    for (size_t i = 0; i < reports->size(); ++i) {
      for (Part* part : parts_) part->hear(i, (*reports)[i]);
      more |= (*reports)[i].more;
    }
  }
  asked_at_ = Clock::steady().now();
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Report>> Leader::sync() {
  absl::Status status = tell(CommandKind::kSync);
  absl::StatusOr<std::string_view> bytes;
  if (status.ok()) {
    bytes = group_.exchange(std::string(Report::kBytes, '\0'));
    status = bytes.status();
  }
  std::vector<Report> reports;
  for (size_t i = 1; status.ok() && i <= about_followers_.size(); ++i) {
    auto report = base::read_fields<Report>(bytes->substr(i * Report::kBytes, Report::kBytes),
                                            absl::StrCat("a report of rank ", i));
    status = report.status();
    if (status.ok()) reports.push_back(*std::move(report));
  }
  if (status.ok()) return reports;
  if (group_.status().ok()) group_.abort(status);
  note(status);
  return status;
}

}  // namespace baton::engine::shard
