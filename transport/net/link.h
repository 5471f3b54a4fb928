// The result of a handshake for a connection: its keys, and how its bytes are protected.
#pragma once

#include <cstdint>

#include "transport/net/ciphers/crypto.h"

namespace baton::net {

// How the bytes of a connection are protected. Heads (whatever says where bytes go) always are.
enum class Protection : uint8_t {
  kHeads = 0,      // heads carry a tag; payload is as it is
  kIntegrity = 1,  // payload carries a tag too
  kEncrypt = 2,    // heads and payload are encrypted, under a tag
};

// A set of them.
using Protections = uint8_t;
constexpr Protections bit(Protection protection) {
  return static_cast<Protections>(1u << static_cast<unsigned>(protection));
}
inline constexpr Protections kHeadsOnly = bit(Protection::kHeads);
inline constexpr Protections kAllProtections =
    bit(Protection::kHeads) | bit(Protection::kIntegrity) | bit(Protection::kEncrypt);

const char* name(Protection protection);

struct LinkKeys {
  uint16_t version = 0;  // the protocol's
  Protection protection = Protection::kHeads;
  Key32 send{};
  Key32 receive{};
};

// A connected, non-blocking socket whose peer has proved itself.
struct Link {
  int fd = -1;
  LinkKeys keys;
};

}  // namespace baton::net
