// The first message of each side of a handshake: versions, shares of a key, ids of cluster keys.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "transport/identity.h"
#include "transport/net/ciphers/crypto.h"
#include "transport/net/link.h"

namespace baton::net {

inline constexpr std::string_view kMagic = "BATON\r\n\x1a";

struct Opening {
  static constexpr size_t kPrefixBytes = 8 + 4 + 2 + 2 + 32;  // all of it in versions to 3
  static constexpr size_t kIds = ClusterKey::kMost;
  static constexpr size_t kIdBytes = 16;
  static constexpr size_t kBytes = kPrefixBytes + 32 + 32 + kIds * kIdBytes + 8;
  static constexpr uint8_t kNoKey = 0xff;

  uint32_t highest = 0;  // version
  uint16_t purpose = 0;  // of a client
  uint16_t lowest = 0;
  Key32 nonce{};
  Key32 share{};
  Key32 static_key{};                                     // zeros: of no worker
  std::array<std::array<uint8_t, kIdBytes>, kIds> ids{};  // of a client
  uint32_t version = 0;                                   // of a server
  uint8_t which = kNoKey;                                 // of a server: of the ids
  Protections offers = kHeadsOnly;
  Protections needs = kHeadsOnly;

  std::string encode(bool client) const;
  // `bytes` are kBytes. What is reserved is not looked at.
  static Opening decode(std::string_view bytes, bool client);
};

}  // namespace baton::net
