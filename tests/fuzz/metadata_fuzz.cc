// Fuzzes what workers tell each other about themselves: addresses, introductions, regions,
// counters. Whatever is accepted must survive a round trip.

#include "tests/fuzz/expect.h"
#include "transport/address.h"
#include "transport/counter.h"
#include "transport/decorators.h"
#include "transport/net/handshake.h"
#include "transport/region.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  round_trip<baton::Address>(bytes).IgnoreError();
  round_trip<baton::RemoteRegion>(bytes).IgnoreError();
  round_trip<baton::RemoteCounter>(bytes).IgnoreError();
  const auto hello = round_trip<baton::HelloInfo>(bytes);
  expect(!hello.ok() || (hello->name.size() <= 64 && hello->extra.size() <= 512));
  static_cast<void>(baton::LinkShape::parse(bytes));
  return 0;
}
