// Names of blocks, saving them when they are published, and loads of them.
#include "engine/serve/cache/kv_tiers.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/shard/tier_ranks.h"

namespace baton::engine::serve {
namespace {

using kvtransfer::tiers::TierFound;
using kvtransfer::tiers::TierIdentity;
using kvtransfer::tiers::TierKey;
using kvtransfer::tiers::TierSave;
using kvtransfer::tiers::TierStoreOptions;

// For several ranks it covers all of them: each has its own names for its part.
TierIdentity identity_of(const KvGeometry& geometry, const Model& model, const std::string& salt) {
  return {.weights = model.fingerprint(),
          .tokenizer = "",  // a block's name has the numbers of its tokens
          .dtype = "bf16",
          .layout = absl::StrCat("[layer][kv_head]{K[head_dim][token] V[token][head_dim]} ",
                                 geometry.layers, "x", geometry.kv_heads, "x", geometry.head_dim,
                                 "x", geometry.block_tokens),
          .shard = model.shard().whole() ? "0/1" : absl::StrCat("all of ", model.shard().ranks),
          .adapter = "",
          .salt = salt};
}

}  // namespace

shard::RankTiers KvTierOptions::of_rank(const ModelShard& shard) const {
  if (!wanted()) return std::nullopt;
  const auto ranks = static_cast<size_t>(shard.ranks);
  const bool own_folder = !disk.empty() && ranks > 1;
  return shard::RankTierOptions{
      .store = {.host_bytes = host_bytes / ranks,
                .disk = own_folder ? absl::StrCat(disk, "/rank-", shard.rank, "-of-", ranks) : disk,
                .disk_bytes = disk_bytes / ranks,
                .peer = peer},
      .salt = salt};
}

absl::StatusOr<std::unique_ptr<KvTiers>> KvTiers::open(const KvTierOptions& options,
                                                       const Model& model, shard::Leader* leader,
                                                       const KvCache& cache, BlockManager& blocks,
                                                       const Clock& clock) {
  const KvGeometry& geometry = cache.geometry();
  std::unique_ptr<KvTiers> tiers(new KvTiers(options, identity_of(geometry, model, options.salt),
                                             blocks, shard::most_pinned(cache.num_blocks()),
                                             leader != nullptr || options.peer != nullptr));
  TierStoreOptions own = options.of_rank(model.shard())->store;
  own.clock = &clock;
  auto store = shard::open_tiers(std::move(own), cache);
  if (!store.ok()) return store.status();
  tiers->store_ = *std::move(store);
  if (leader != nullptr) {
    tiers->store_ =
        std::make_unique<shard::RanksTierStore>(*leader, std::move(tiers->store_), model.shard(),
                                                static_cast<uint32_t>(geometry.layers), clock);
  }
  return tiers;
}

TierKey KvTiers::key(const BlockHash& hash) const {
  return keys_.key(std::string_view(reinterpret_cast<const char*>(&hash), sizeof(hash)));
}

std::optional<size_t> KvTiers::find(std::span<const BlockHash> chain, size_t cached) {
  if (!store_->is_on() || chain.size() <= cached) return 0;
  std::vector<TierKey> keys;
  for (const BlockHash& hash : chain.subspan(cached)) {
    keys.push_back(key(hash));
    // The first one tells of most prompts that nothing is here. Others are asked once, for all.
    if (!asks_others_ && keys.size() == 1 && store_->find(keys).blocks == 0) return 0;
  }
  const TierFound found = store_->find(keys);
  if (found.pending) return std::nullopt;
  return found.blocks;
}

void KvTiers::published(uint32_t block, const BlockHash& hash) {
  if (store_->is_on()) pending_.push_back({block, hash});
}

bool KvTiers::poll() {
  const std::vector<uint32_t> unpinned = store_->unpinned();
  for (uint32_t block : unpinned) blocks_.release(std::span(&block, 1));
  pinned_ -= unpinned.size();
  while (!pending_.empty() && pinned_ < max_pinned_) {
    const Pending& next = pending_.front();
    if (!blocks_.holds(next.block, next.hash)) {
      ++dropped_;
      pending_.pop_front();
      continue;
    }
    const TierSave save{key(next.hash), next.block};
    std::vector<uint32_t> pinned;
    blocks_.acquire(std::span(&next.hash, 1), &pinned);
    if (store_->save(std::span(&save, 1)) == 0) {
      blocks_.release(pinned);
      break;
    }
    ++pinned_;
    pending_.pop_front();
  }
  return !unpinned.empty();
}

void KvTiers::flush() {
  while (busy()) {
    store_->flush();
    poll();
  }
  store_->flush();
}

absl::Status KvTiers::start_load(kvtransfer::KvLoad load) {
  std::vector<BlockHash> chain;
  extend_chain(load.tokens, kBlockTokens, root_, &chain);
  std::vector<TierKey> keys;
  for (size_t i = load.first_token / kBlockTokens; i < chain.size(); ++i) {
    keys.push_back(key(chain[i]));
  }
  if (keys.size() != load.blocks.size()) {
    return absl::InternalError(
        absl::StrCat("a load of ", keys.size(), " KV blocks into ", load.blocks.size()));
  }
  loads_[load.id] = store_->load(keys, load.blocks, load.timeout);
  return absl::OkStatus();
}

uint32_t KvTiers::layers_loaded(kvtransfer::KvRequestId id) {
  const auto it = loads_.find(id);
  return it == loads_.end() ? 0 : store_->layers_loaded(it->second);
}

absl::Status KvTiers::load_status(kvtransfer::KvRequestId id) {
  const auto it = loads_.find(id);
  if (it == loads_.end()) return absl::NotFoundError("no such load");
  return store_->load_status(it->second);
}

bool KvTiers::end_load(kvtransfer::KvRequestId id) {
  const auto it = loads_.find(id);
  if (it == loads_.end()) return true;
  if (!store_->end_load(it->second)) return false;
  loads_.erase(it);
  return true;
}

}  // namespace baton::engine::serve
