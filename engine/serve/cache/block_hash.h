// Hash chains over blocks of tokens: the names under which the prefix cache and KV stores know
// blocks.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

namespace baton::engine::serve {

// 128 bits that stand for a block's tokens, all tokens before it and the model. The same in every
// process and on every machine, so that all that share a store mean the same block by the same
// name.
struct BlockHash {
  uint64_t low = 0;
  uint64_t high = 0;

  friend bool operator==(const BlockHash&, const BlockHash&) = default;
  template <typename H>
  friend H AbslHashValue(H state, const BlockHash& hash) {
    return H::combine(std::move(state), hash.low, hash.high);
  }
};

// The first half of SHA-256(parent, bytes): a prompt cannot be crafted to collide with another's.
BlockHash chain_hash(const BlockHash& parent, std::string_view bytes);
BlockHash chain_hash(const BlockHash& parent, std::span<const int32_t> tokens);

// What the first block of every chain is chained to: KV is of no use to another model, so blocks of
// two have no names in common. `fingerprint`: Model::fingerprint().
BlockHash model_root(std::string_view fingerprint);

// Appends the hashes of the full blocks of `tokens` that `chain` does not have yet.
void extend_chain(std::span<const int32_t> tokens, int block_tokens, const BlockHash& root,
                  std::vector<BlockHash>* chain);

}  // namespace baton::engine::serve
