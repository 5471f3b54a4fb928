// The KV tiers of a tensor-parallel model, at rank 0: one store to the engine, and each call of it
// is one at every rank, which keeps the KV of its own heads.
//
//   auto own = open_tiers(options, cache);                      // a follower has one of its own
//   auto leader = Leader::create(group, model, limits, "all", options);
//   auto store = std::make_unique<RanksTierStore>(*leader, *std::move(own), model.shard(), layers);
//
// A block is here when it is here at every rank: what one has evicted, lost or never taken is a
// miss for all. A load is complete when it is at every rank, and has failed when it has at one; no
// block is free before all ranks have let go of it. As with hand-offs (kv_ranks.h), the other ranks
// hear of calls with the next step or when they are asked how far they are. What is only to be
// saved waits for a step: no caller waits for that.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "engine/kernels/kv_cache.h"
#include "engine/model/shard.h"
#include "engine/shard/leader.h"
#include "engine/shard/loads.h"
#include "kvtransfer/tiers/tier_record.h"
#include "kvtransfer/tiers/tier_store.h"
#include "transport/clock.h"

namespace baton::engine::shard {

// A rank's names of the blocks in its KV tiers.

// Its rank and the number of ranks are in them, so that no rank finds other heads than its own, in
// whatever store or directory they meet.
class RankKeys {
 public:
  explicit RankKeys(const ModelShard& shard)
      : keys_({.weights = "",
               .tokenizer = "",
               .dtype = "",
               .layout = "",
               .shard = absl::StrCat(shard.rank, "/", shard.ranks),
               .adapter = "",
               .salt = ""}) {}
  kvtransfer::tiers::TierKey of(const kvtransfer::tiers::TierKey& block) const {
    return keys_.key({reinterpret_cast<const char*>(block.bytes.data()), block.bytes.size()});
  }
  std::vector<kvtransfer::tiers::TierKey> of(
      std::span<const kvtransfer::tiers::TierKey> blocks) const {
    std::vector<kvtransfer::tiers::TierKey> own;
    own.reserve(blocks.size());
    for (const kvtransfer::tiers::TierKey& block : blocks) own.push_back(of(block));
    return own;
  }

 private:
  kvtransfer::tiers::TierKeys keys_;
};

// Blocks of the cache that are held for being saved: a sixteenth of it, so that saving takes room
// from no sequence.
constexpr size_t most_pinned(size_t blocks) { return std::clamp<size_t>(blocks / 16, 1, 32); }

// Tiers below this cache, which must outlive them. `options` says all but the cache and how much of
// it may be held.
absl::StatusOr<std::unique_ptr<kvtransfer::tiers::TierStore>> open_tiers(
    kvtransfer::tiers::TierStoreOptions options, const KvCache& cache);

// When the group fails, loads fail with it, and what is under way counts as ended at other ranks:
// nothing reads their memory any more.
class RanksTierStore final : public kvtransfer::tiers::TierStore, private Leader::Part {
 public:
  // `own` is rank 0's, below a cache of so many layers. The leader must outlive the store, and its
  // followers have tiers.
  RanksTierStore(Leader& leader, std::unique_ptr<kvtransfer::tiers::TierStore> own,
                 const ModelShard& shard, uint32_t layers, const Clock& clock);
  ~RanksTierStore() override;

  bool is_on() const override { return own_->is_on() && leader_.status().ok(); }
  // Pending until all ranks have answered, unless rank 0 has nothing. One chain at a time is asked
  // for: another one takes its place.
  kvtransfer::tiers::TierFound find(std::span<const kvtransfer::tiers::TierKey> keys) override;
  // Nothing, unless all ranks have answered for these keys lately.
  kvtransfer::tiers::TierFound find_known(
      std::span<const kvtransfer::tiers::TierKey> keys) override;
  size_t save(std::span<const kvtransfer::tiers::TierSave> saves) override;
  std::vector<uint32_t> unpinned() override;
  bool has_pinned() const override { return !saves_.empty() || !free_.empty(); }
  kvtransfer::tiers::TierLoadId load(std::span<const kvtransfer::tiers::TierKey> keys,
                                     std::span<const uint32_t> blocks, Time timeout) override;
  // All or none, as with hand-offs.
  uint32_t layers_loaded(kvtransfer::tiers::TierLoadId id) override {
    return loads_.layers_loaded(id, layers_);
  }
  absl::Status load_status(kvtransfer::tiers::TierLoadId id) override { return loads_.status(id); }
  bool end_load(kvtransfer::tiers::TierLoadId id) override;
  void wait(Time timeout, int fd) override;
  void flush() override;
  // Rank 0's; memory, and what went wrong, at all ranks, as of when they were asked last.
  kvtransfer::tiers::TierStats stats() const override;
  std::string explain() const override;

 private:
  struct Question {
    uint64_t id = 0;
    std::vector<kvtransfer::tiers::TierKey> keys;
    size_t own_blocks = 0;  // that rank 0 had, at most, when it asked
    size_t answers = 0;     // of followers
    std::vector<kvtransfer::tiers::TierFound> found;
    Time answered_at{};
  };
  struct Save {
    uint32_t block = 0;
    size_t ranks = 0;  // that read it no more
  };
  Time patience() const override;
  void hear(size_t follower, const Report& report) override;

  bool is_asked(std::span<const kvtransfer::tiers::TierKey> keys, size_t own_blocks) const;
  void ask(std::span<const kvtransfer::tiers::TierKey> keys, size_t own_blocks);
  // What all ranks have, of which this one has `found`.
  kvtransfer::tiers::TierFound at_all_ranks(kvtransfer::tiers::TierFound found) const;
  void unpin(uint64_t save);
  void follow_own_saves();

  Leader& leader_;
  const std::unique_ptr<kvtransfer::tiers::TierStore> own_;
  const size_t followers_;
  const RankKeys names_;
  const uint32_t layers_;
  const Clock& clock_;
  uint64_t next_id_ = 1;
  Question question_;
  absl::flat_hash_map<uint64_t, Save> saves_;
  absl::flat_hash_map<uint32_t, std::deque<uint64_t>> own_saves_;  // by block
  std::vector<uint32_t> free_;                                     // let go of by all ranks
  RanksLoads<kvtransfer::tiers::TierStore> loads_;
  mutable std::mutex stats_mutex_;                      // any thread may ask for them
  std::vector<kvtransfer::tiers::TierStats> reported_;  // of followers
};

}  // namespace baton::engine::shard
