// Fuzzes what ranks tell each other when a communicator starts: link offers and measured costs.

#include "collectives/executor/transfer_link.h"
#include "collectives/prediction/cost_model.h"
#include "tests/fuzz/expect.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace baton::collectives;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  if (const auto offer = executor::TransferLink::Offer::decode(bytes); offer.ok()) {
    if (offer->encode() != bytes) std::abort();
  }
  if (const auto slots = executor::TransferLink::Slots::decode(bytes); slots.ok()) {
    expect(slots->offset <= slots->region.size);
    expect(slots->slot_bytes <= slots->region.size - slots->offset);
    if (slots->encode() != bytes) std::abort();
  }
  if (const auto cost = prediction::decode_cost_parameters(bytes); cost.ok()) {
    const std::string encoded = encode(*cost);
    const auto again = prediction::decode_cost_parameters(encoded);
    if (!again.ok() || encode(*again) != encoded) std::abort();
    if (!(prediction::agree({&*cost, 1}).gamma >= 0)) std::abort();
  }
  return 0;
}
