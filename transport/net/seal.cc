// Tags and ciphers of frames.
#include "transport/net/seal.h"

#include <openssl/crypto.h>

#include <string>

namespace baton::net {
namespace {

SipHash siphash_of(const Key32& key) {
  const std::string bytes = hkdf_expand(key, "baton heads", 16);
  uint64_t halves[2];
  std::memcpy(halves, bytes.data(), sizeof halves);
  return {halves[0], halves[1]};
}

}  // namespace

Seal::Seal(const Key32& key, Protection protection, Aead::Direction direction)
    : protection_(protection), heads_(siphash_of(key)) {
  if (protection == Protection::kHeads) return;
  payload_.emplace(hkdf_expand(key, "baton payload"), direction);
  if (protection == Protection::kEncrypt) {
    head_cipher_.emplace(hkdf_expand(key, "baton encrypted heads"), direction);
  }
}

void Sealer::head(char* at, size_t bytes, uint64_t number) {
  const auto length = static_cast<uint32_t>(bytes);
  std::memcpy(at, &length, sizeof length);
  char* const head = at + kSealPrefix;
  if (!head_cipher_.has_value()) {
    const SipHash::Tag tag = head_tag(number, at, bytes);
    std::memcpy(head + bytes, tag.data(), kSealTag);
    return;
  }
  head_cipher_->start(number);
  head_cipher_->authenticate(at, kSealPrefix);
  head_cipher_->crypt(head, bytes, head);
  head_cipher_->seal(head + bytes);
}

void Sealer::payload(const void* from, size_t bytes, void* to) {
  if (protection_ == Protection::kEncrypt) return payload_->crypt(from, bytes, to);
  // The copy is what leaves, so the copy gets the tag: its owner may write to the original.
  if (from != to) std::memcpy(to, from, bytes);
  payload_->authenticate(to, bytes);
}

void Opener::payload(void* data, size_t bytes) {
  if (protection_ == Protection::kEncrypt) return payload_->crypt(data, bytes, data);
  payload_->authenticate(data, bytes);
}

bool Opener::open(char* at, size_t bytes, uint64_t number) {
  char* const head = at + kSealPrefix;
  if (!head_cipher_.has_value()) {
    const SipHash::Tag tag = head_tag(number, at, bytes);
    return CRYPTO_memcmp(tag.data(), head + bytes, kSealTag) == 0;
  }
  head_cipher_->start(number);
  head_cipher_->authenticate(at, kSealPrefix);
  head_cipher_->crypt(head, bytes, head);
  return head_cipher_->open(head + bytes);
}

}  // namespace baton::net
