// AES-256-GCM through OpenSSL's EVP, piece by piece.
#include "transport/net/ciphers/crypto.h"

#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/sha.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>

#include "transport/base/worker_keys.h"

namespace baton::net {
namespace {

unsigned char* raw(void* data) { return static_cast<unsigned char*>(data); }
const unsigned char* raw(const void* data) { return static_cast<const unsigned char*>(data); }

}  // namespace

Aead::Aead(const Key32& key, Direction direction)
    : context_(EVP_CIPHER_CTX_new(), &EVP_CIPHER_CTX_free), seals_(direction == Direction::kSeal) {
  works_ = context_ != nullptr && EVP_CipherInit_ex(context_.get(), EVP_aes_256_gcm(), nullptr,
                                                    key.data(), nullptr, seals_ ? 1 : 0) == 1;
}

void Aead::start(uint64_t number) {
  std::array<unsigned char, 12> nonce{};
  std::memcpy(nonce.data() + 4, &number, sizeof number);
  works_ =
      works_ && EVP_CipherInit_ex(context_.get(), nullptr, nullptr, nullptr, nonce.data(), -1) == 1;
}

void Aead::authenticate(const void* data, size_t bytes) {
  int done = 0;
  works_ = works_ && EVP_CipherUpdate(context_.get(), nullptr, &done, raw(data),
                                      static_cast<int>(bytes)) == 1;
}

void Aead::crypt(const void* from, size_t bytes, void* to) {
  int done = 0;
  works_ = works_ && EVP_CipherUpdate(context_.get(), raw(to), &done, raw(from),
                                      static_cast<int>(bytes)) == 1;
  if (!works_) std::memset(to, 0, bytes);  // it may have been there, unsealed
}

void Aead::seal(void* tag) {
  int done = 0;
  unsigned char nothing[EVP_MAX_BLOCK_LENGTH];
  works_ = works_ && EVP_CipherFinal_ex(context_.get(), nothing, &done) == 1 &&
           EVP_CIPHER_CTX_ctrl(context_.get(), EVP_CTRL_GCM_GET_TAG, kTagBytes, tag) == 1;
  if (!works_) std::memset(tag, 0, kTagBytes);
}

bool Aead::open(const void* tag) {
  int done = 0;
  unsigned char nothing[EVP_MAX_BLOCK_LENGTH];
  unsigned char expected[kTagBytes];
  std::memcpy(expected, tag, sizeof expected);
  return works_ &&
         EVP_CIPHER_CTX_ctrl(context_.get(), EVP_CTRL_GCM_SET_TAG, kTagBytes, expected) == 1 &&
         EVP_CipherFinal_ex(context_.get(), nothing, &done) == 1;
}

namespace {

const unsigned char* raw(std::string_view bytes) {
  return reinterpret_cast<const unsigned char*>(bytes.data());
}

using PKey = std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)>;
using PKeyContext = std::unique_ptr<EVP_PKEY_CTX, decltype(&EVP_PKEY_CTX_free)>;

PKey key_of(const Key32& bytes) {
  return {EVP_PKEY_new_raw_private_key(EVP_PKEY_X25519, nullptr, bytes.data(), bytes.size()),
          &EVP_PKEY_free};
}

}  // namespace

Key32 sha256(std::string_view bytes) {
  Key32 out{};
  SHA256(raw(bytes), bytes.size(), out.data());
  return out;
}

Key32 hmac(std::string_view key, std::string_view message) {
  Key32 out{};
  unsigned int length = 0;
  HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()), raw(message), message.size(),
       out.data(), &length);
  return out;
}

Key32 hkdf_extract(std::string_view salt, std::string_view secret) { return hmac(salt, secret); }

std::string hkdf_expand(const Key32& key, std::string_view info, size_t bytes) {
  std::string out;
  std::string block;
  for (char count = 1; out.size() < bytes; ++count) {
    block.append(info);
    block.push_back(count);
    block = view(hmac(view(key), block));
    out.append(block, 0, std::min(block.size(), bytes - out.size()));
  }
  return out;
}

Key32 hkdf_expand(const Key32& key, std::string_view info) {
  const std::string bytes = hkdf_expand(key, info, sizeof(Key32));
  Key32 out{};
  std::copy(bytes.begin(), bytes.end(), out.begin());
  return out;
}

KeyPair KeyPair::make() {
  KeyPair made;
  base::fill_with_secret(made.private_key.data(), made.private_key.size());
  const PKey pair = key_of(made.private_key);
  // Without memory it stays zero, with which no peer agrees on anything.
  size_t bytes = made.public_key.size();
  if (pair != nullptr) EVP_PKEY_get_raw_public_key(pair.get(), made.public_key.data(), &bytes);
  return made;
}

std::optional<Key32> agree(const Key32& ours, const Key32& theirs) {
  const PKey mine = key_of(ours);
  const PKey peer(
      EVP_PKEY_new_raw_public_key(EVP_PKEY_X25519, nullptr, theirs.data(), theirs.size()),
      &EVP_PKEY_free);
  const PKeyContext context(EVP_PKEY_CTX_new(mine.get(), nullptr), &EVP_PKEY_CTX_free);
  Key32 out{};
  size_t bytes = out.size();
  if (EVP_PKEY_derive_init(context.get()) != 1 ||
      EVP_PKEY_derive_set_peer(context.get(), peer.get()) != 1 ||
      EVP_PKEY_derive(context.get(), out.data(), &bytes) != 1) {
    return std::nullopt;
  }
  return out;
}

}  // namespace baton::net
