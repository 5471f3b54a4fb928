// The frames of tcp and ucx rails: one fixed header, then a variable part, then payload.
//
//   header (88 bytes, little-endian) | pieces (12 bytes each) | text | payload
//
//   kWrite      initiator -> target   payload bytes for the target's pieces (region offset, bytes);
//                                     text is the notification. Frames of one slice follow each
//                                     other; the last one carries kLast.
//   kWriteAck   target -> initiator   all bytes of the slice are visible, or code and text say why
//   kRead       initiator -> target   asks for the bytes of these pieces; no payload
//   kReadData   target -> initiator   the bytes of one kRead, in order
//   kReadEnd    target -> initiator   closes one kRead: the bytes before it are good, or code and
//                                     text say why not
//   kCancelRead initiator -> target   data of this slice that has not been sent need not be
//   kGoodbye    either way            the sender closes the connection for good; text says why
//
// Encoding and decoding are pure functions over bytes. decode_header() and decode_pieces() accept
// nothing that a correct peer would not send, and never read past what they are given.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "transport/transfer.h"

namespace baton::framed {

enum class FrameType : uint8_t {
  kWrite = 1,
  kWriteAck = 2,
  kRead = 3,
  kReadData = 4,
  kReadEnd = 5,
  kCancelRead = 6,
  kGoodbye = 7,
};

inline constexpr uint8_t kLast = 1;       // kWrite: the slice is complete with this frame
inline constexpr uint8_t kAbandoned = 2;  // kWrite, with kLast: the sender gave the slice up

inline constexpr size_t kHeaderBytes = 88;
inline constexpr size_t kPieceBytes = 12;
inline constexpr uint32_t kMaxPieces = 512;        // per frame
inline constexpr uint32_t kMaxPayload = 1u << 20;  // per frame
inline constexpr uint32_t kMaxText = 512;          // of an error; notifications: kMaxNotification
inline constexpr size_t kMaxMeta = kMaxPieces * kPieceBytes + kMaxNotification;
inline constexpr size_t kMaxHead = kHeaderBytes + kMaxMeta;

// A header in memory. Fields that do not belong to its type are zero.
struct Frame {
  FrameType type = FrameType::kWrite;
  uint8_t flags = 0;
  absl::StatusCode code = absl::StatusCode::kOk;  // kWriteAck, kReadEnd
  TransferId transfer;                            // as numbered by the initiator
  uint32_t slice = 0;
  uint32_t bytes = 0;         // of the payload; kRead: asked for
  uint32_t pieces = 0;        // kWrite, kRead
  uint32_t text = 0;          // bytes of it
  uint32_t region = 0;        // kWrite, kRead
  uint32_t generation = 0;    // of the region
  uint64_t key = 0;           // of the region
  uint64_t slice_offset = 0;  // where in the slice the bytes start; kReadEnd: where they ended
  uint64_t slice_bytes = 0;   // kWrite
  uint64_t total_bytes = 0;   // kWrite: of the transfer
  uint32_t counter = 0;       // kWrite
  uint16_t counter_generation = 0;
  uint64_t increment = 0;

  bool operator==(const Frame&) const = default;
  size_t meta_bytes() const { return pieces * kPieceBytes + text; }
  size_t payload_bytes() const {
    return type == FrameType::kWrite || type == FrameType::kReadData ? bytes : 0;
  }
};

// A run of bytes in the region that a frame names.
struct WirePiece {
  uint64_t offset = 0;
  uint32_t bytes = 0;
  bool operator==(const WirePiece&) const = default;
};

// Writes kHeaderBytes to `out`.
void encode_header(const Frame& frame, char* out);
// Writes kPieceBytes to `out`.
void encode_piece(const WirePiece& piece, char* out);

// `bytes` are kHeaderBytes from the wire. InvalidArgument says what a correct peer would not send.
absl::StatusOr<Frame> decode_header(std::string_view bytes);

// The pieces of a frame from its variable part (meta_bytes() long) into out[0, frame.pieces). None
// is empty, none overflows, together they hold frame.bytes bytes.
absl::Status decode_pieces(const Frame& frame, std::string_view meta, absl::Span<WirePiece> out);

// The text of a frame within its variable part.
inline std::string_view frame_text(const Frame& frame, std::string_view meta) {
  return meta.substr(frame.pieces * kPieceBytes, frame.text);
}

// "WRITE", "READ_DATA", ... for messages.
const char* frame_name(FrameType type);

}  // namespace baton::framed
