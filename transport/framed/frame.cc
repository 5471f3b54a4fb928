// Encodes frames, and decodes them strictly: what no correct peer would send is refused.
#include "transport/framed/frame.h"

#include <bit>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "transport/base/nearest_name.h"
#include "transport/base/wire.h"

namespace baton::framed {
namespace {

static_assert(std::endian::native == std::endian::little, "the wire format is little-endian");

constexpr uint16_t kMagic = 0xBA70;

// A header behind its magic, in its order on the wire. Returns what is reserved.
template <typename Wire, typename T>
uint32_t members(Wire& wire, T& f, uint16_t& code) {
  uint32_t reserved = 0;
  wire(f.type, f.flags, code, f.counter_generation, f.transfer, f.slice, f.bytes, f.pieces, f.text,
       f.region, f.generation, f.key, f.slice_offset, f.slice_bytes, f.total_bytes, f.counter,
       reserved, f.increment);
  return reserved;
}

struct RawWriter {
  char* out;
  template <typename... T>
  void operator()(const T&... members) {
    ((std::memcpy(out, &members, sizeof members), out += sizeof members), ...);
  }
};

absl::Status refuse(const Frame& frame, std::string_view why) {
  return absl::InvalidArgumentError(
      absl::StrCat("hostile or damaged ", frame_name(frame.type), " frame: ", std::string(why)));
}

// Fields that only kWrite uses.
bool write_fields_clear(const Frame& f) {
  return f.slice_bytes == 0 && f.total_bytes == 0 && f.counter == 0 && f.counter_generation == 0 &&
         f.increment == 0 && f.flags == 0;
}
bool region_fields_clear(const Frame& f) {
  return f.region == 0 && f.generation == 0 && f.key == 0 && f.pieces == 0;
}

absl::Status check_write(const Frame& f) {
  if (f.flags & ~(kLast | kAbandoned)) return refuse(f, "unknown flags");
  const bool last = f.flags & kLast;
  const bool abandoned = f.flags & kAbandoned;
  if (f.bytes > kMaxPayload) return refuse(f, "payload too large");
  if (f.pieces > kMaxPieces) return refuse(f, "too many pieces");
  if (f.pieces > f.bytes || (f.pieces == 0) != (f.bytes == 0)) {
    return refuse(f, "pieces and payload contradict each other");
  }
  if (f.text > kMaxNotification) return refuse(f, "notification too long");
  if (f.slice_bytes > f.total_bytes) return refuse(f, "slice larger than its transfer");
  if (f.slice_offset > f.slice_bytes || f.bytes > f.slice_bytes - f.slice_offset) {
    return refuse(f, "payload lies outside of the slice");
  }
  if (abandoned && (!last || f.bytes != 0)) return refuse(f, "abandoned, but not the last");
  if (!abandoned && last != (f.slice_offset + f.bytes == f.slice_bytes)) {
    return refuse(f, "end of the slice in the wrong place");
  }
  if (f.text != 0 && !last) return refuse(f, "notification before the last frame");
  if (!last && f.bytes == 0) return refuse(f, "empty");
  return absl::OkStatus();
}

absl::Status check(const Frame& f) {
  const bool has_code = f.type == FrameType::kWriteAck || f.type == FrameType::kReadEnd;
  if (!has_code && f.code != absl::StatusCode::kOk) return refuse(f, "unexpected status");
  if (f.type == FrameType::kWrite) return check_write(f);
  if (!write_fields_clear(f)) return refuse(f, "unexpected fields");
  if (f.type == FrameType::kRead) {
    if (f.bytes == 0 || f.bytes > kMaxPayload) return refuse(f, "asks for too many or no bytes");
    if (f.pieces == 0 || f.pieces > kMaxPieces || f.pieces > f.bytes) {
      return refuse(f, "too many or no pieces");
    }
    if (f.text != 0) return refuse(f, "unexpected text");
    if (f.slice_offset > UINT64_MAX - f.bytes) return refuse(f, "offset overflows");
    return absl::OkStatus();
  }
  if (!region_fields_clear(f)) return refuse(f, "unexpected fields");
  switch (f.type) {
    case FrameType::kReadData:
      if (f.bytes == 0 || f.bytes > kMaxPayload) return refuse(f, "payload too large or empty");
      if (f.text != 0) return refuse(f, "unexpected text");
      break;
    case FrameType::kWriteAck:
      if (f.slice_offset != 0) return refuse(f, "unexpected fields");
      [[fallthrough]];
    case FrameType::kReadEnd:
    case FrameType::kGoodbye:
      if (f.bytes != 0) return refuse(f, "unexpected payload");
      if (f.text > kMaxText) return refuse(f, "text too long");
      break;
    default:
      if (f.bytes != 0 || f.text != 0 || f.slice_offset != 0) {
        return refuse(f, "unexpected fields");
      }
  }
  return absl::OkStatus();
}

}  // namespace

const char* frame_name(FrameType type) {
  constexpr const char* kNames[] = {"unknown",   "WRITE",    "WRITE_ACK",   "READ",
                                    "READ_DATA", "READ_END", "CANCEL_READ", "GOODBYE"};
  static_assert(std::size(kNames) == static_cast<size_t>(FrameType::kGoodbye) + 1);
  return base::name_at(kNames, type, "unknown");
}

void encode_header(const Frame& f, char* out) {
  RawWriter wire{out};
  auto code = static_cast<uint16_t>(f.code);
  wire(kMagic);
  members(wire, f, code);
}

void encode_piece(const WirePiece& piece, char* out) { RawWriter{out}(piece.offset, piece.bytes); }

absl::StatusOr<Frame> decode_header(std::string_view bytes) {
  if (bytes.size() != kHeaderBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("a frame header has ", kHeaderBytes, " bytes, not ", bytes.size()));
  }
  base::WireReader in(bytes);
  if (in.number<uint16_t>() != kMagic) {
    return absl::InvalidArgumentError("not a frame (wrong magic)");
  }
  Frame f;
  uint16_t code = 0;
  const uint32_t reserved = members(in, f, code);
  if (f.type < FrameType::kWrite || f.type > FrameType::kGoodbye) {
    return absl::InvalidArgumentError(
        absl::StrCat("unknown frame type ", static_cast<int>(f.type)));
  }
  if (code > static_cast<uint16_t>(absl::StatusCode::kUnauthenticated)) {
    return refuse(f, "unknown status code");
  }
  f.code = static_cast<absl::StatusCode>(code);
  if (reserved != 0) return refuse(f, "reserved bytes are not zero");
  absl::Status status = check(f);
  if (!status.ok()) return status;
  return f;
}

absl::Status decode_pieces(const Frame& frame, std::string_view meta, absl::Span<WirePiece> out) {
  if (meta.size() != frame.meta_bytes() || out.size() < frame.pieces) {
    return refuse(frame, "variable part is incomplete");
  }
  uint64_t sum = 0;
  for (uint32_t i = 0; i < frame.pieces; ++i) {
    WirePiece& piece = out[i];
    std::memcpy(&piece.offset, meta.data() + i * kPieceBytes, 8);
    std::memcpy(&piece.bytes, meta.data() + i * kPieceBytes + 8, 4);
    if (piece.bytes == 0) return refuse(frame, "empty piece");
    if (piece.offset > UINT64_MAX - piece.bytes) return refuse(frame, "piece overflows");
    sum += piece.bytes;
  }
  if (sum != frame.bytes) return refuse(frame, "the pieces' sizes do not add up to the payload");
  return absl::OkStatus();
}

}  // namespace baton::framed
