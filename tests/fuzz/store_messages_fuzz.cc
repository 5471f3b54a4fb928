// Fuzzes what an engine and a KV store tell each other: what is accepted has numbers that can be,
// and is the same when it is written again.

#include <variant>

#include "kvtransfer/store/store_messages.h"
#include "tests/std.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace baton::kvtransfer::store;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const auto message = decode_store_message(bytes);
  if (!message.ok()) return 0;
  if (const auto* found = std::get_if<Found>(&*message)) {
    for (uint32_t page : found->pages) {
      if (page == kNotThere) continue;
      const uint64_t begin = found->base + uint64_t{page} * baton::kvtransfer::tiers::kPage;
      if (begin >= found->region.size) std::abort();
    }
  }
  if (const auto* offer = std::get_if<Offer>(&*message)) {
    const size_t record = offer->shape.record_bytes();
    if (record > kLargestRecord || offer->offset + record > offer->region.size) std::abort();
  }
  const std::string again = encode(*message);
  const auto second = decode_store_message(again);
  if (!second.ok() || encode(*second) != again) std::abort();
  return 0;
}
