// Fuzzes the frames of the tcp provider: what is accepted encodes to the same header again, and its
// pieces add up to the bytes that it announces.

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "transport/tcp/frame.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  namespace tcp = baton::tcp;
  std::string_view stream(reinterpret_cast<const char*>(data), size);
  while (stream.size() >= tcp::kHeaderBytes) {
    const auto frame = tcp::decode_header(stream.substr(0, tcp::kHeaderBytes));
    stream.remove_prefix(tcp::kHeaderBytes);
    if (!frame.ok()) return 0;
    if (frame->pieces > tcp::kMaxPieces || frame->meta_bytes() > tcp::kMaxMeta) std::abort();
    if (frame->payload_bytes() > tcp::kMaxPayload) std::abort();

    std::array<char, tcp::kHeaderBytes> header{};
    tcp::encode_header(*frame, header.data());
    const auto again = tcp::decode_header({header.data(), header.size()});
    if (!again.ok() || !(*again == *frame)) std::abort();

    if (stream.size() < frame->meta_bytes()) return 0;
    // A copy of exactly this size: reading past it is then an error that is seen.
    const std::string meta(stream.substr(0, frame->meta_bytes()));
    stream.remove_prefix(meta.size());
    static std::array<tcp::WirePiece, tcp::kMaxPieces> pieces;
    if (!tcp::decode_pieces(*frame, meta, absl::MakeSpan(pieces)).ok()) return 0;
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < frame->pieces; ++i) bytes += pieces[i].bytes;
    if (frame->pieces > 0 && bytes != frame->bytes) std::abort();
    if (tcp::frame_text(*frame, meta).size() != frame->text) std::abort();
    stream.remove_prefix(std::min(stream.size(), frame->payload_bytes()));
  }
  return 0;
}
