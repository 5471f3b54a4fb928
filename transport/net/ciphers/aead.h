// AES-256-GCM (NIST SP 800-38D) by OpenSSL, of one key and one direction.
#pragma once

#include <openssl/evp.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "transport/net/ciphers/key_schedule.h"

namespace baton::net {

// Between start() and the tag, pieces of any sizes. Never seal two different texts with one number.
// Where OpenSSL has no memory, zeros are sealed, under a tag that no receiver takes, and nothing
// opens.
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
  // What was decrypted is good only if this is true.
  [[nodiscard]] bool open(const void* tag);

 private:
  std::unique_ptr<EVP_CIPHER_CTX, decltype(&EVP_CIPHER_CTX_free)> context_;
  const bool seals_;
  bool works_ = false;
};

}  // namespace baton::net
