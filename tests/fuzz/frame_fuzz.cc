// Fuzzes the frames of the tcp provider: what is accepted encodes to the same header again, and its
// pieces add up to the bytes that it announces.

#include "tests/std.h"
#include "transport/framed/frame.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  namespace framed = baton::framed;
  std::string_view stream(reinterpret_cast<const char*>(data), size);
  while (stream.size() >= framed::kHeaderBytes) {
    const auto frame = framed::decode_header(stream.substr(0, framed::kHeaderBytes));
    stream.remove_prefix(framed::kHeaderBytes);
    if (!frame.ok()) return 0;
    if (frame->pieces > framed::kMaxPieces || frame->meta_bytes() > framed::kMaxMeta) std::abort();
    if (frame->payload_bytes() > framed::kMaxPayload) std::abort();

    std::array<char, framed::kHeaderBytes> header{};
    framed::encode_header(*frame, header.data());
    const auto again = framed::decode_header({header.data(), header.size()});
    if (!again.ok() || !(*again == *frame)) std::abort();

    if (stream.size() < frame->meta_bytes()) return 0;
    // A copy of exactly this size: reading past it is then an error that is seen.
    const std::string meta(stream.substr(0, frame->meta_bytes()));
    stream.remove_prefix(meta.size());
    static std::array<framed::WirePiece, framed::kMaxPieces> pieces;
    if (!framed::decode_pieces(*frame, meta, absl::MakeSpan(pieces)).ok()) return 0;
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < frame->pieces; ++i) bytes += pieces[i].bytes;
    if (frame->pieces > 0 && bytes != frame->bytes) std::abort();
    if (framed::frame_text(*frame, meta).size() != frame->text) std::abort();
    stream.remove_prefix(std::min(stream.size(), frame->payload_bytes()));
  }
  return 0;
}
