// Openings as bytes: all fields have their places, whatever they hold.
#include "transport/net/opening.h"

#include <algorithm>

#include "transport/base/wire.h"

namespace baton::net {
namespace {

constexpr size_t kServerReserved = Opening::kIds * Opening::kIdBytes - 5;
constexpr size_t kReserved = 6;

template <typename Bytes>
void put_bytes(std::string& out, const Bytes& bytes) {
  out.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

template <typename Bytes>
void take_bytes(base::WireReader& in, Bytes& out) {
  const std::string_view bytes = in.take(out.size());
  std::copy(bytes.begin(), bytes.end(), out.begin());
}

}  // namespace

std::string Opening::encode(bool client) const {
  std::string out(kMagic);
  base::put_number(out, highest);
  base::put_number(out, purpose);
  base::put_number(out, lowest);
  put_bytes(out, nonce);
  put_bytes(out, share);
  put_bytes(out, static_key);
  if (client) {
    for (const auto& id : ids) put_bytes(out, id);
  } else {
    base::put_number(out, version);
    base::put_number(out, which);
    out.append(kServerReserved, '\0');
  }
  base::put_number(out, offers);
  base::put_number(out, needs);
  out.append(kReserved, '\0');
  return out;
}

Opening Opening::decode(std::string_view bytes, bool client) {
  base::WireReader in(bytes);
  Opening out;
  in.take(kMagic.size());
  out.highest = in.number<uint32_t>();
  out.purpose = in.number<uint16_t>();
  out.lowest = in.number<uint16_t>();
  take_bytes(in, out.nonce);
  take_bytes(in, out.share);
  take_bytes(in, out.static_key);
  if (client) {
    for (auto& id : out.ids) take_bytes(in, id);
  } else {
    out.version = in.number<uint32_t>();
    out.which = in.number<uint8_t>();
    in.take(kServerReserved);
  }
  out.offers = in.number<uint8_t>();
  out.needs = in.number<uint8_t>();
  return out;
}

}  // namespace baton::net
