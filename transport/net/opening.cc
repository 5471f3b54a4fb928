// Openings as bytes: all fields have their places, whatever they hold.
#include "transport/net/opening.h"

#include <array>

#include "transport/base/wire.h"

namespace baton::net {
namespace {

constexpr size_t kServerReserved = Opening::kIds * Opening::kIdBytes - 5;
constexpr size_t kReserved = 6;

template <typename Wire, typename T>
void members(Wire& wire, T& m, bool client) {
  std::array<uint8_t, kServerReserved> server_reserved{};
  std::array<uint8_t, kReserved> reserved{};
  wire(m.highest, m.purpose, m.lowest, m.nonce, m.share, m.static_key);
  if (client) {
    wire(m.ids);
  } else {
    wire(m.version, m.which, server_reserved);
  }
  wire(m.offers, m.needs, reserved);
}

}  // namespace

std::string Opening::encode(bool client) const {
  std::string out(kMagic);
  base::WireWriter wire(out);
  members(wire, *this, client);
  return out;
}

Opening Opening::decode(std::string_view bytes, bool client) {
  base::WireReader in(bytes);
  Opening out;
  in.take(kMagic.size());
  members(in, out, client);
  return out;
}

}  // namespace baton::net
