// By OpenSSL: the arithmetic of keys, which is HKDF-SHA256 (RFC 5869), SHA-256 and X25519 (RFC
// 7748), and AES-256-GCM (NIST SP 800-38D).
#pragma once

#include <openssl/evp.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace baton::net {

using Key32 = std::array<uint8_t, 32>;

inline std::string_view view(const Key32& key) {
  return {reinterpret_cast<const char*>(key.data()), key.size()};
}

Key32 sha256(std::string_view bytes);
Key32 hmac(std::string_view key, std::string_view message);  // HMAC-SHA256

// RFC 5869, section 2.2 and 2.3. `bytes`: at most 255 * 32.
Key32 hkdf_extract(std::string_view salt, std::string_view secret);
std::string hkdf_expand(const Key32& key, std::string_view info, size_t bytes);
Key32 hkdf_expand(const Key32& key, std::string_view info);

// An X25519 key pair for one handshake.
struct KeyPair {
  Key32 public_key{};
  Key32 private_key{};
  static KeyPair make();
};
// The shared secret of both ends. Nothing if `theirs` is not a valid key (of small order).
std::optional<Key32> agree(const Key32& ours, const Key32& theirs);

// AES-256-GCM of one key and one direction. Between start() and the tag, pieces of any sizes. Never
// seal two different texts with one number. Where OpenSSL has no memory, zeros are sealed, under a
// tag that no receiver takes, and nothing opens.
class Aead {
 public:
  static constexpr size_t kTagBytes = 16;
  enum class Direction { kSeal, kOpen };

  Aead(const Key32& key, Direction direction);

  void start(uint64_t number);
  // Under the tag, and as it is. Before any crypt().
  void authenticate(const void* data, size_t bytes);
  // Also in place.
  void crypt(const void* from, size_t bytes, void* to);
  void seal(void* tag);
  // Use the decrypted bytes only if this returns true.
  [[nodiscard]] bool open(const void* tag);

 private:
  std::unique_ptr<EVP_CIPHER_CTX, decltype(&EVP_CIPHER_CTX_free)> context_;
  const bool seals_;
  bool works_ = false;
};

}  // namespace baton::net
