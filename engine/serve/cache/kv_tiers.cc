// Names of blocks, saving them when they are published, and loads of them.
#include "engine/serve/cache/kv_tiers.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"

namespace baton::engine::serve {
namespace {

using kvtransfer::tiers::TierFound;
using kvtransfer::tiers::TierIdentity;
using kvtransfer::tiers::TierKey;
using kvtransfer::tiers::TierSave;
using kvtransfer::tiers::TierStore;

constexpr size_t kMostPinned = 32;

LoadPlace slowest(const TierFound& found) {
  if (found.peer > 0) return LoadPlace::kPeer;
  return found.disk > 0 ? LoadPlace::kDisk : LoadPlace::kHost;
}

TierIdentity identity_of(const KvGeometry& geometry, const std::string& weights,
                         const std::string& salt) {
  return {.weights = weights,
          .tokenizer = "",  // a block's name has the numbers of its tokens
          .dtype = "bf16",
          .layout = absl::StrCat("[layer][kv_head]{K[head_dim][token] V[token][head_dim]} ",
                                 geometry.layers, "x", geometry.kv_heads, "x", geometry.head_dim,
                                 "x", geometry.block_tokens),
          .shard = "0/1",
          .adapter = "",
          .salt = salt};
}

}  // namespace

absl::StatusOr<std::unique_ptr<KvTiers>> KvTiers::open(const KvTierOptions& options,
                                                       const std::string& weights,
                                                       const KvCache& cache, BlockManager& blocks,
                                                       const Clock& clock) {
  const KvGeometry& geometry = cache.geometry();
  // A sixteenth of the cache, so that saving takes room from nobody.
  const size_t max_pinned = std::clamp<size_t>(cache.num_blocks() / 16, 1, kMostPinned);
  std::unique_ptr<KvTiers> tiers(
      new KvTiers(options, identity_of(geometry, weights, options.salt), blocks, max_pinned));
  auto store = TierStore::open({.cache = {.base = cache.base(),
                                          .layers = static_cast<uint32_t>(geometry.layers),
                                          .blocks = static_cast<uint32_t>(cache.num_blocks()),
                                          .block_bytes = geometry.block_bytes()},
                                .host_bytes = options.host_bytes,
                                .disk = options.disk,
                                .disk_bytes = options.disk_bytes,
                                .io_uring = options.io_uring,
                                .peer = options.peer,
                                .pinned_blocks = max_pinned,
                                .clock = &clock});
  if (!store.ok()) return store.status();
  tiers->store_ = *std::move(store);
  return tiers;
}

TierKey KvTiers::key(const BlockHash& hash) const {
  return keys_.key(std::string_view(reinterpret_cast<const char*>(&hash), sizeof(hash)));
}

std::optional<size_t> KvTiers::worth_loading(std::span<const BlockHash> chain, size_t cached) {
  if (!store_->is_on() || chain.size() <= cached) return 0;
  std::vector<TierKey> keys;
  for (const BlockHash& hash : chain.subspan(cached)) {
    keys.push_back(key(hash));
    // The first one tells of most prompts that nothing is here. Others are asked once, for all.
    if (options_.peer == nullptr && keys.size() == 1 && store_->find(keys).blocks == 0) return 0;
  }
  const TierFound found = store_->find(keys);
  if (found.pending) return std::nullopt;
  if (found.blocks == 0) return 0;
  const auto quicker = [&](size_t count, LoadPlace place) {
    return choice_.load_is_quicker(cached * kBlockTokens, count * kBlockTokens, count, place);
  };
  if (options_.always_load || quicker(found.blocks, slowest(found))) return found.blocks;
  // Without what is in another process, it may be.
  if (found.near == 0 || found.near == found.blocks) return 0;
  const TierFound near = store_->find(std::span(keys).first(found.near));
  return quicker(near.blocks, slowest(near)) ? near.blocks : 0;
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
  extend_chain(load.tokens, kBlockTokens, &chain);
  std::vector<TierKey> keys;
  for (size_t i = load.first_token / kBlockTokens; i < chain.size(); ++i) {
    keys.push_back(key(chain[i]));
  }
  if (keys.size() != load.blocks.size()) {
    return absl::InternalError(
        absl::StrCat("a load of ", keys.size(), " KV blocks into ", load.blocks.size()));
  }
  const TierFound found = store_->find(keys);
  loads_[load.id] = {.id = store_->load(keys, load.blocks, load.timeout),
                     .blocks = keys.size(),
                     .place = slowest(found)};
  return absl::OkStatus();
}

uint32_t KvTiers::layers_loaded(kvtransfer::KvRequestId id) {
  const auto it = loads_.find(id);
  return it == loads_.end() ? 0 : store_->layers_loaded(it->second.id);
}

absl::Status KvTiers::load_status(kvtransfer::KvRequestId id) {
  const auto it = loads_.find(id);
  if (it == loads_.end()) return absl::NotFoundError("no such load");
  return store_->load_status(it->second.id);
}

bool KvTiers::end_load(kvtransfer::KvRequestId id) {
  const auto it = loads_.find(id);
  if (it == loads_.end()) return true;
  Load& load = it->second;
  const Time took = store_->load_time(load.id);
  if (!load.noted && took > Time{} && store_->load_status(load.id).ok()) {
    choice_.loaded(load.blocks, load.place, took);
    load.noted = true;
  }
  if (!store_->end_load(load.id)) return false;
  loads_.erase(it);
  return true;
}

}  // namespace baton::engine::serve
