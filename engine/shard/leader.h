// Rank 0 of a tensor-parallel model: tells the others what the engine computes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
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
#include "engine/shard/limits.h"
#include "kvtransfer/tiers/tier_store.h"
#include "transport/clock.h"

namespace baton::engine::shard {

// The first `tokens` tokens of a send (KvRanks) are computed by a step, in every layer; they lie in
// the blocks of a chunk.
struct StepSend {
  uint64_t id = 0;
  size_t tokens = 0;
  uint32_t chunk = 0;
};

// The KV tiers of a rank, and what is in the names of all its blocks.
struct RankTierOptions {
  kvtransfer::tiers::TierStoreOptions store;  // all but the cache
  std::string salt;                           // rank 0 names the blocks: equal at all ranks
};
// None: nothing is kept below the cache.
using RankTiers = std::optional<RankTierOptions>;

// The settings that all ranks of a model must share.
Settings settings_of(const Model& model, const StepLimits& limits, std::string_view role,
                     const RankTiers& tiers = {});

// One thread at a time: the engine's.
class Leader {
 public:
  // Blocks until all followers are ready; see Group::agree() for its errors. The group must outlive
  // the leader. `role` is any word that must be equal at all ranks. With `tiers` the engine has a
  // RanksTierStore (tier_ranks.h), and the followers have the like.
  static absl::StatusOr<std::unique_ptr<Leader>> create(Group& group, const Model& model,
                                                        const StepLimits& limits,
                                                        std::string_view role = "all",
                                                        const RankTiers& tiers = {});
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

  // What each follower said of itself, from rank 1 on: its KV address, "" without a session.
  const std::vector<std::string>& about_followers() const { return about_followers_; }
  bool has_tiers() const { return has_tiers_; }
  // All followers have answered, or the group has failed and no rank does anything any more.
  bool everywhere(size_t followers) const {
    return followers == about_followers_.size() || !status().ok();
  }

  // What rank 0 has in common with the others: a session (kv_ranks.h), a store (tier_ranks.h).
  class Part {
   public:
    // How long it can go without hearing of the others; kNever: there is nothing to hear of.
    virtual Time patience() const = 0;
    // What a follower, counted from 0, has reported.
    virtual void hear(size_t follower, const Report& report) = 0;

   protected:
    ~Part() = default;
  };
  void join(Part* part) { parts_.push_back(part); }
  void leave(Part* part) { std::erase(parts_, part); }

  // The followers make the call, after all earlier ones of its kind, when the next step begins or
  // they are asked: soon, but for calls that are not `urgent`.
  void call(KvCall call) {
    command_.calls.push_back(std::move(call));
    urgent_ = true;
  }
  void call(TierCall call, bool urgent) {
    command_.tier_calls.push_back(std::move(call));
    urgent_ |= urgent;
  }
  bool has_calls() const { return urgent_; }
  // Outside a step: they make the calls and report what has changed, which the parts hear.
  absl::Status ask();
  // The same, if it is time to. In a step it does nothing.
  void progress();

  // While there is nothing to compute.
  void look() { note(group_.look()); }
  // OK until the group has failed.
  absl::Status status() const { return group_.status(); }

 private:
  Leader(Group& group, std::vector<std::string> about_followers, bool has_tiers)
      : group_(group), about_followers_(std::move(about_followers)), has_tiers_(has_tiers) {}
  absl::Status tell(CommandKind kind);
  absl::StatusOr<std::vector<Report>> sync();
  void note(const absl::Status& status);

  Group& group_;
  const std::vector<std::string> about_followers_;
  const bool has_tiers_;
  std::vector<Part*> parts_;
  bool urgent_ = false;
  Time asked_at_{};
  bool in_step_ = false;
  Command command_;
  std::string bytes_;
  std::function<void(const absl::Status&)> on_failure_;
};

}  // namespace baton::engine::shard
