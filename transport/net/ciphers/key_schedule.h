// The arithmetic of keys: HKDF-SHA256 (RFC 5869), SHA-256 and X25519 (RFC 7748), by OpenSSL.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
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
// What both ends alone can compute. Nothing: `theirs` is no key (of small order).
std::optional<Key32> agree(const Key32& ours, const Key32& theirs);

}  // namespace baton::net
