// Encoding and decoding of introductions and envelopes.
#include "transport/ucx/message.h"

#include <cstring>

#include "transport/base/wire.h"

namespace baton::ucx {

void Envelope::encode(char* out) const {
  const uint32_t reserved = 0;
  std::memcpy(out, &rail, 4);
  std::memcpy(out + 4, &reserved, 4);
  std::memcpy(out + 8, &number, 8);
}

Envelope Envelope::decode(std::string_view message) {
  Envelope out;
  std::memcpy(&out.rail, message.data(), 4);
  std::memcpy(&out.number, message.data() + 8, 8);
  return out;
}

std::string Introduction::encode() const {
  std::string out;
  base::put_number(out, rail);
  return out + address;
}

std::optional<Introduction> Introduction::decode(std::string_view words) {
  base::WireReader in(words);
  Introduction out;
  out.rail = in.number<uint32_t>();
  if (in.failed() || words.size() <= sizeof out.rail) return std::nullopt;
  out.address = words.substr(sizeof out.rail);
  return out;
}

}  // namespace baton::ucx
