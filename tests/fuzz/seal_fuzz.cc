// Fuzzes the tags of frames: what comes after honest frames and is no honest frame itself is never
// taken for one. The first byte picks the protection, and how many honest frames come first.

#include "tests/std.h"
#include "transport/framed/frame.h"
#include "transport/net/seal.h"

namespace {

using baton::net::Key32;
using baton::net::kSealBytes;
using baton::net::kSealPrefix;
using baton::net::kSealTag;
using baton::net::Opener;
using baton::net::Protection;
using baton::net::Sealer;

constexpr std::string_view kPayload = "a payload";

std::string frame(Sealer& sealer, const std::string& head) {
  std::string body(kPayload);
  if (sealer.payload()) {
    body.resize(kPayload.size() + kSealTag);
    sealer.start_payload();
    sealer.payload(kPayload.data(), kPayload.size(), body.data());
    sealer.end_payload(body.data() + kPayload.size());
  }
  std::string out(head.size() + kSealBytes, '\0');
  head.copy(out.data() + kSealPrefix, head.size());
  sealer.head(out.data(), head.size());
  return out + body;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const auto protection = static_cast<Protection>(data[0] % 3);
  const size_t honest = data[0] / 3 % 4;
  const Key32 key{1, 2, 3};
  Sealer sealer(key, protection);
  Opener opener(key, protection);
  std::string wire;
  for (size_t i = 0; i < honest; ++i) wire += frame(sealer, std::string(i + 1, 'h'));
  wire.append(reinterpret_cast<const char*>(data) + 1, size - 1);
  size_t at = 0;
  for (size_t frames = 0;; ++frames) {
    std::string_view head;
    const auto found =
        opener.head(wire.data() + at, wire.size() - at, baton::framed::kMaxHead, head);
    if (found != Opener::Found::kHead) return 0;
    // What an honest sender would have said next is no attack.
    if (frames >= honest && head != std::string(frames + 1, 'h')) std::abort();
    if (head.size() > baton::framed::kMaxHead) std::abort();
    at += head.size() + kSealBytes;
    const size_t tag = opener.payload() ? kSealTag : 0;
    if (wire.size() - at < kPayload.size() + tag) return 0;
    if (opener.payload()) {
      opener.start_payload();
      opener.payload(wire.data() + at, kPayload.size());
      const bool good = opener.end_payload(wire.data() + at + kPayload.size());
      if (!good && frames < honest) std::abort();
      if (!good) return 0;
      if (std::string_view(wire).substr(at, kPayload.size()) != kPayload) std::abort();
    }
    at += kPayload.size() + tag;
  }
}
