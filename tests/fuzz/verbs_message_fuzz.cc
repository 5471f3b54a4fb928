// Fuzzes what two workers say to each other over RDMA: messages, and the ports of a hello
// (behind a first byte of 0, which no message begins with). What is accepted keeps within its
// limits, and encodes to something that is accepted and says the same.

#include "tests/fuzz/expect.h"
#include "tests/std.h"
#include "transport/internal/tables/arrivals.h"
#include "verbs/device/message.h"

namespace baton::verbs {
namespace {

// `decode` and encode() undo each other.
template <typename Decode>
auto check(std::string_view body, const Decode& decode) {
  auto value = decode(body);
  if (!value.ok()) return value;
  std::string once, twice;
  encode(once, *value);
  expect(once.size() <= kMessageBytes - kHeaderBytes);
  const auto again = decode(once);
  expect(again.ok());
  encode(twice, *again);
  expect(once == twice);
  return value;
}

void check_message(const Message& message) {
  switch (message.kind) {
    case Kind::kArrival:
      if (auto arrival = check(message.body, decode_arrival); arrival.ok()) {
        expect(arrival->slice < internal::Arrivals::kMaxSlices &&
               arrival->transfer.slot < internal::Arrivals::kMaxSlots);
        expect(arrival->slice_bytes <= arrival->total_bytes);
        expect(arrival->counter_index < CounterTable::kCapacity ||
               CounterTable::reserved(arrival->counter_index));
        expect(arrival->notify.size() <= kMaxArrivalNotify);
      }
      return;
    case Kind::kAsk:
    case Kind::kForget:
      check(message.body, decode_name).status().IgnoreError();
      return;
    case Kind::kTell:
      if (auto answer = check(message.body, decode_answer); answer.ok()) {
        expect(answer->rkeys.size() <= kMaxPorts && answer->base + answer->size >= answer->base);
      }
      return;
    case Kind::kConnect:
    case Kind::kConnected:
      if (auto end = check(message.body, decode_endpoint); end.ok()) {
        expect(end->rail < end->rails && end->incarnation > 0 && end->queue_pair < 1 << 24);
        expect(end->mtu >= IBV_MTU_256 && end->mtu <= IBV_MTU_4096 && end->receives >= 8);
      }
      return;
    case Kind::kRefused:
    case Kind::kDrained:
    case Kind::kGoodbye:
      check(message.body, decode_note).status().IgnoreError();
      return;
    default:
      return;
  }
}

}  // namespace
}  // namespace baton::verbs

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  namespace verbs = baton::verbs;
  // A copy of exactly this size: reading past it is then an error that is seen.
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  if (size > 0 && data[0] == 0) {
    const auto offers = verbs::decode_offers(std::string_view(bytes).substr(1));
    if (!offers.ok()) return 0;
    if (offers->empty() || offers->size() > verbs::kMaxPorts) std::abort();
    if (verbs::encode_offers(*offers) != bytes.substr(1)) std::abort();
    return 0;
  }
  const auto message = verbs::decode_message(bytes);
  if (message.ok()) verbs::check_message(*message);
  return 0;
}
