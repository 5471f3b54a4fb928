// A rank's names of the blocks in its KV tiers.
#pragma once

#include <span>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/model/shard.h"
#include "kvtransfer/tiers/tier_key.h"

namespace baton::engine::shard {

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

}  // namespace baton::engine::shard
