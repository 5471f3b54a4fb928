// Names of KV blocks that may outlive a process: a fingerprint of all that the bytes depend on.
//
//   const TierKeys keys({.weights = model.fingerprint(), .dtype = "bf16", .layout = "..."});
//   TierKey key = keys.key(chained_hash_of_the_block);
//
// Two blocks have one key only where every field below and the chained hash (the block's tokens and
// all tokens before them) are equal. A field that an engine has no use for stays empty.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>

namespace baton::kvtransfer::tiers {

// What the bytes of a block follow from, besides its tokens.
struct TierIdentity {
  std::string weights;    // a hash over weights and config
  std::string tokenizer;  // that made the tokens, where their numbers do not say it all
  std::string dtype;      // of K and V
  std::string layout;     // how a block's bytes are ordered
  std::string shard;      // which heads and layers of the model
  std::string adapter;    // LoRA or the like
  std::string salt;       // of a tenant: equal prompts of two are not shared
};

// SHA-256: no attacker can make two that are equal.
struct TierKey {
  std::array<uint8_t, 32> bytes{};

  friend bool operator==(const TierKey&, const TierKey&) = default;
  // Eight of its bytes, which are as good as random.
  uint64_t short_hash() const {
    uint64_t value;
    std::memcpy(&value, bytes.data(), sizeof(value));
    return value;
  }
  template <typename H>
  friend H AbslHashValue(H state, const TierKey& key) {
    return H::combine(std::move(state), key.short_hash());
  }
};

// Keys of one identity. Immutable: any thread may call.
class TierKeys {
 public:
  explicit TierKeys(const TierIdentity& identity);
  // `chained` stands for the block's tokens and all before them: a hash that no attacker can forge.
  TierKey key(std::string_view chained) const;

 private:
  TierKey identity_;
};

}  // namespace baton::kvtransfer::tiers
