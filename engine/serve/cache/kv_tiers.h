// The engine's way to the KV tiers: which blocks to save, which to load, and under what names.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "engine/kernels/kv_cache.h"
#include "engine/model/model.h"
#include "engine/serve/cache/block_manager.h"
#include "engine/shard/leader.h"
#include "kvtransfer/kv_connector.h"
#include "kvtransfer/tiers/tier_store.h"
#include "transport/clock.h"

namespace baton::engine::serve {

struct KvTierOptions {
  size_t host_bytes = 0;  // 0: none in host memory
  std::string disk;       // a directory of this server's own; empty: none on disk
  size_t disk_bytes = 0;
  kvtransfer::tiers::PeerTierFactory peer;          // empty: none in another process
  std::string salt;                                 // prompts under another salt are not shared
  Time timeout = patient(std::chrono::seconds(5));  // for a load; then the prompt is computed

  bool wanted() const { return host_bytes > 0 || !disk.empty() || peer != nullptr; }
  // A rank's tiers: its share of the bytes and, below `disk`, a directory of its own; nothing
  // if none are wanted. The factory makes this rank's connection to the other process.
  shard::RankTiers of_rank(const ModelShard& shard) const;
};

// Blocks that the prefix cache knows are saved once each, in the background, while a reference of
// this object's keeps them as they are. As a KvSource it brings them back. Not thread-safe.
class KvTiers : public kvtransfer::KvSource {
 public:
  // For `model`, or rank 0 of one in several parts, of which the others follow `leader`. The cache
  // and `blocks` must outlive this object.
  static absl::StatusOr<std::unique_ptr<KvTiers>> open(const KvTierOptions& options,
                                                       const Model& model, shard::Leader* leader,
                                                       const KvCache& cache, BlockManager& blocks,
                                                       const Clock& clock);

  // How many blocks of the chain behind the first `cached` can be loaded. Nothing: others were
  // asked; ask again after wait().
  std::optional<size_t> find(std::span<const BlockHash> chain, size_t cached);
  // The prefix cache knows this block from now on.
  void published(uint32_t block, const BlockHash& hash);
  // Gives back what has been saved and takes on what is to be; true if any block became free.
  bool poll();
  // Blocks it holds a reference of.
  size_t references() const { return pinned_; }
  // Something is being saved, or will be.
  bool busy() const { return pinned_ > 0 || !pending_.empty(); }
  const Time& timeout() const { return options_.timeout; }

  kvtransfer::tiers::TierStats stats() const { return store_->stats(); }
  // Blocks that were overwritten before the tiers could take them.
  uint64_t dropped() const { return dropped_; }
  std::string explain() const { return store_->explain(); }
  // Blocks until everything that was published is saved, or lost; for tests.
  void flush();

  void progress() override {}
  void wait(Time timeout, int fd) override { store_->wait(timeout, fd); }
  absl::Status start_load(kvtransfer::KvLoad load) override;
  uint32_t layers_loaded(kvtransfer::KvRequestId id) override;
  absl::Status load_status(kvtransfer::KvRequestId id) override;
  bool end_load(kvtransfer::KvRequestId id) override;

 private:
  KvTiers(const KvTierOptions& options, const kvtransfer::tiers::TierIdentity& identity,
          BlockManager& blocks, size_t max_pinned, bool asks_others)
      : options_(options),
        keys_(identity),
        root_(model_root(identity.weights)),
        blocks_(blocks),
        max_pinned_(max_pinned),
        asks_others_(asks_others) {}

  struct Pending {
    uint32_t block = 0;
    BlockHash hash;
  };
  kvtransfer::tiers::TierKey key(const BlockHash& hash) const;

  const KvTierOptions options_;
  const kvtransfer::tiers::TierKeys keys_;
  const BlockHash root_;
  BlockManager& blocks_;
  const size_t max_pinned_;
  const bool asks_others_;  // another process, or ranks, for what they have
  std::unique_ptr<kvtransfer::tiers::TierStore> store_;
  std::deque<Pending> pending_;
  size_t pinned_ = 0;
  uint64_t dropped_ = 0;
  absl::flat_hash_map<kvtransfer::KvRequestId, kvtransfer::tiers::TierLoadId> loads_;
};

}  // namespace baton::engine::serve
