// Names blocks by SHA-256.
#include "engine/serve/cache/block_hash.h"

#include <openssl/sha.h>
#include <array>
#include <bit>
#include <cstring>
#include <string>

namespace baton::engine::serve {

static_assert(std::endian::native == std::endian::little, "hashes are defined over little endian");

BlockHash chain_hash(const BlockHash& parent, std::string_view bytes) {
  std::string input(reinterpret_cast<const char*>(&parent), sizeof(parent));
  input.append(bytes);
  std::array<unsigned char, SHA256_DIGEST_LENGTH> digest;
  SHA256(reinterpret_cast<const unsigned char*>(input.data()), input.size(), digest.data());
  BlockHash hash;
  std::memcpy(&hash, digest.data(), sizeof(hash));
  return hash;
}

BlockHash chain_hash(const BlockHash& parent, std::span<const int32_t> tokens) {
  return chain_hash(
      parent, std::string_view(reinterpret_cast<const char*>(tokens.data()), tokens.size_bytes()));
}

BlockHash model_root(std::string_view fingerprint) {
  // No chain goes on from zeros: a fingerprint cannot be taken for a block's tokens.
  return chain_hash(BlockHash{}, fingerprint);
}

void extend_chain(std::span<const int32_t> tokens, int block_tokens, const BlockHash& root,
                  std::vector<BlockHash>* chain) {
  const size_t full = tokens.size() / block_tokens;
  while (chain->size() < full) {
    const BlockHash parent = chain->empty() ? root : chain->back();
    chain->push_back(
        chain_hash(parent, tokens.subspan(chain->size() * block_tokens, block_tokens)));
  }
}

}  // namespace baton::engine::serve
