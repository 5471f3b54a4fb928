// Fuzzes what decode and prefill workers tell each other: the input is a row of notifications
// (16-bit length, bytes), put together and parsed the way a connector does it.

#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "kvtransfer/internal/connector/kv_messages.h"
#include "kvtransfer/kv_layout.h"
#include "transport/base/wire.h"

namespace {

using namespace baton::kvtransfer;

// What is taken can be written, and is read the same. (A layout can be cut into runs in more ways.)
template <typename Body>
void parse(std::string_view bytes, Body body) {
  if (!decode_kv(bytes, body).ok()) return;
  std::string once, twice;
  if (!body.check().ok() || !encode_kv(body, once).ok()) std::abort();
  if (!decode_kv(once, body).ok() || !encode_kv(body, twice).ok() || once != twice) std::abort();
}

void parse_body(std::string_view body) {
  parse(body, KvLoadRequest());
  KvLoadRequest pulled;
  pulled.pull = true;
  parse(body, pulled);
  parse(body, KvOffer());
  parse(body, KvReady());
  parse(body, KvLease());
  parse(body, KvRenewal());
  if (decode_kv_failure(body).ok()) std::abort();  // a failure is never OK
  if (const auto layout = KvLayout::decode(body); layout.ok()) {
    if (!layout->check().ok() || layout->encode().size() > KvLayout::kMaxEncoded) std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  baton::base::WireReader in({reinterpret_cast<const char*>(data), size});
  KvAssembler assembler;
  KvSeenLoads seen;
  std::string body;
  for (;;) {
    const std::string_view notification = in.text(UINT16_MAX);
    if (in.failed()) return 0;
    parse_body(notification);
    KvMessagePart part;
    if (!decode_kv_part(notification, part).ok()) continue;
    static_cast<void>(seen.add(part.load));
    const auto whole = assembler.add(part, body);
    if (assembler.open() > KvAssembler::kMaxOpen) std::abort();
    if (assembler.held() > KvAssembler::kMaxHeld) std::abort();
    if (whole.ok() && *whole) {
      if (body.size() != part.total) std::abort();
      parse_body(body);
    }
  }
}
