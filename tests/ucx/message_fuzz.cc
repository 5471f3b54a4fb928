// Fuzzes what a ucx rail hears of its peer: an introduction that is accepted encodes to the same
// words again, and so does an envelope.
#include <array>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "transport/ucx/message.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace baton::ucx;
  const std::string_view words(reinterpret_cast<const char*>(data), size);
  if (const auto introduction = Introduction::decode(words)) {
    if (introduction->address.empty() || introduction->encode() != words) std::abort();
  }
  if (words.size() >= Envelope::kBytes) {
    const Envelope envelope = Envelope::decode(words);
    std::array<char, Envelope::kBytes> again{};
    envelope.encode(again.data());
    if (!(Envelope::decode({again.data(), again.size()}) == envelope)) std::abort();
  }
  return 0;
}
