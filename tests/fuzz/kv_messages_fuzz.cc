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

void parse_request(std::string_view body, uint16_t version) {
  baton::kvtransfer::KvLoadRequest request;
  if (baton::kvtransfer::decode_kv_request(body, request, version).ok()) {
    std::string encoded;
    baton::kvtransfer::KvLoadRequest again;
    if (!baton::kvtransfer::check_kv_request(request).ok()) std::abort();
    if (!baton::kvtransfer::encode_kv_request(request, encoded).ok()) std::abort();
    if (!baton::kvtransfer::decode_kv_request(encoded, again, request.version()).ok()) {
      std::abort();
    }
    if (again.tokens != request.tokens || again.blocks != request.blocks) std::abort();
    if (again.pull != request.pull || again.lease != request.lease) std::abort();
  }
}

// What only loads that pull need.
void parse_pull(std::string_view body) {
  baton::kvtransfer::KvOffer offer;
  if (baton::kvtransfer::decode_kv_offer(body, offer).ok()) {
    std::string encoded;
    if (!baton::kvtransfer::encode_kv_offer(offer, encoded).ok()) std::abort();
    if (!baton::kvtransfer::decode_kv_offer(encoded, offer).ok()) std::abort();
  }
  baton::kvtransfer::KvReady ready;
  if (baton::kvtransfer::decode_kv_ready(body, ready).ok()) {
    if (body != baton::kvtransfer::encode_kv_ready(ready.layer, ready.first_block, ready.blocks)) {
      std::abort();
    }
  }
  if (const auto lease = baton::kvtransfer::decode_kv_lease(body); lease.ok()) {
    if (body != baton::kvtransfer::encode_kv_lease(*lease)) std::abort();
  }
}

void parse_body(std::string_view body) {
  parse_request(body, baton::kvtransfer::kKvVersion);
  parse_request(body, baton::kvtransfer::kKvPullVersion);
  parse_pull(body);
  if (baton::kvtransfer::decode_kv_failure(body).ok()) std::abort();  // a failure is never OK
  if (const auto layout = baton::kvtransfer::KvLayout::decode(body); layout.ok()) {
    if (!layout->check().ok() ||
        layout->encode().size() > baton::kvtransfer::KvLayout::kMaxEncoded) {
      std::abort();
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  baton::base::WireReader in({reinterpret_cast<const char*>(data), size});
  baton::kvtransfer::KvAssembler assembler;
  baton::kvtransfer::KvSeenLoads seen;
  std::string body;
  for (;;) {
    const std::string_view notification = in.text(UINT16_MAX);
    if (in.failed()) return 0;
    parse_body(notification);
    baton::kvtransfer::KvMessagePart part;
    if (!baton::kvtransfer::decode_kv_part(notification, part).ok()) continue;
    static_cast<void>(seen.add(part.load));
    const auto whole = assembler.add(part, body);
    if (assembler.open() > baton::kvtransfer::KvAssembler::kMaxOpen) std::abort();
    if (assembler.held() > baton::kvtransfer::KvAssembler::kMaxHeld) std::abort();
    if (whole.ok() && *whole) {
      if (body.size() != part.total) std::abort();
      parse_body(body);
    }
  }
}
