// Fuzzes what workers tell each other about themselves: addresses, introductions, regions,
// counters. Whatever is accepted must survive a round trip.

#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "transport/address.h"
#include "transport/counter.h"
#include "transport/decorators.h"
#include "transport/net/handshake.h"
#include "transport/region.h"

namespace {

// Decodes, and if that worked, encodes and decodes again: the encoding must be stable.
template <typename T>
void round_trip(std::string_view bytes) {
  const auto first = T::decode(bytes);
  if (!first.ok()) {
    if (first.status().message().empty()) std::abort();
    return;
  }
  const std::string encoded = first->encode();
  const auto second = T::decode(encoded);
  if (!second.ok() || second->encode() != encoded) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  round_trip<baton::Address>(bytes);
  round_trip<baton::HelloInfo>(bytes);
  round_trip<baton::RemoteRegion>(bytes);
  round_trip<baton::RemoteCounter>(bytes);
  static_cast<void>(baton::LinkShape::parse(bytes));
  return 0;
}
