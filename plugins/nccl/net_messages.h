// The messages of two hubs while a comm is set up.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "plugins/nccl/net.h"
#include "transport/base/fields.h"

namespace baton::nccl {

struct Open {
  uint64_t listener = 0;
  uint64_t sender = 0;
  uint32_t version = kNetVersion;
  RemoteRegion ring;
  uint64_t ring_offset = 0;
  std::array<RemoteCounter, kGroups> posted;
  RemoteCounter ended;
  static void fields(auto& wire, auto& m) {
    wire(m.listener, m.sender, m.version, m.ring, m.ring_offset);
    for (auto& counter : m.posted) wire(counter);
    wire(m.ended);
  }
};
struct Accepted {
  uint64_t sender = 0;
  RemoteCounter ended;
  static void fields(auto& wire, auto& m) { wire(m.sender, m.ended); }
};
struct Refused {
  uint64_t sender = 0;
  std::string why;
  static void fields(auto& wire, auto& m) {
    wire(m.sender);
    wire.brief(m.why, base::kMaxWhy);
  }
};
struct NetMessage {
  enum class Kind : uint8_t { kOpen = 1, kAccepted, kRefused };
  Kind kind = Kind::kOpen;
  Open open;
  Accepted accepted;
  Refused refused;
  static void fields(auto& wire, auto& m) {
    wire.kind(m.kind, Kind::kRefused);
    if (m.kind == Kind::kOpen) wire(m.open);
    if (m.kind == Kind::kAccepted) wire(m.accepted);
    if (m.kind == Kind::kRefused) wire(m.refused);
  }
};

}  // namespace baton::nccl
