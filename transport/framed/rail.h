// The life of a rail that sends slices as frames (those of tcp and ucx): taking slices, taking them
// back, watching for a stall, and the end.
//
// A provider's rail derives from this and adds how frames are sent and received. A rail begins to
// fail with fail(), which only notes why; finish() closes the connection, reports every slice and
// then the rail. After finish() has told the sink, the rail may be gone.
#pragma once

#include <chrono>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "transport/framed/frame.h"
#include "transport/framed/open_slices.h"
#include "transport/provider.h"

namespace baton::framed {

class FramedRail : public Rail {
 public:
  const Properties& properties() const final { return properties_; }
  absl::Status reaches(const RemoteRegion&) const final { return absl::OkStatus(); }
  bool post(const Slice& slice, EventSink& sink) final;
  void abort(TransferId transfer, EventSink& sink) final;
  void close(absl::Status why, EventSink& sink) final;
  bool let_go(TransferId) const override { return true; }

  // By next_timer() at the latest; the rail may be gone afterwards.
  void check_timers(Time now, EventSink& sink);
  Time next_timer() const { return next_check_; }

 protected:
  // `peer`: its name and address, for messages. `stall`: for how long nothing need move. `context`
  // must outlive the rail.
  FramedRail(const ProviderContext& context, Time stall, std::string peer, Properties properties);

  // ---- what a provider's rail says of itself ----
  // A slice has been taken.
  virtual void taken(OpenSlice& slot) = 0;
  // A slice is about to be reported as cancelled: a write of which no byte has left, or a read.
  virtual void take_back(OpenSlice& slot) = 0;
  // A write of which bytes have left is being aborted: what is still to be sent of its memory is
  // copied, or never sent. A rail that cannot says so by let_go().
  virtual void release_memory(OpenSlice&) {}
  // Ends the connection: afterwards nothing is read from or written to any memory for the peer.
  virtual void leave() = 0;
  // Tells the peer, if that is possible at once, that leave() follows and is meant.
  virtual void say_goodbye(std::string_view why) = 0;
  // Whether anything is under way in either direction that needs the peer to move on.
  virtual bool waiting() const = 0;
  // Grows as long as anything moves.
  virtual uint64_t moved() const = 0;
  // The peer is about to be given up because nothing moves.
  virtual void stalled() {}
  // Sends a frame without payload, `text` behind it.
  virtual void send_control(const Frame& frame, std::string_view text) = 0;

  // ---- what it is given ----
  void fail(absl::Status why);
  // "peer NAME over PROVIDER: why"
  absl::Status lost(std::string_view why) const;
  // The peer sent what no correct peer sends: it is not called again.
  void hostile(std::string_view what);
  void hostile(FrameType type, std::string_view why);
  void on_goodbye(const Frame& frame, std::string_view text);
  void finish(EventSink& sink);
  void report(OpenSlice& slot, absl::Status status, EventSink& sink) {
    slots_.report(*this, slot, std::move(status), sink);
  }
  OpenSlice* find_slot(const Frame& frame, Op op) {
    return slots_.find(frame.transfer, frame.slice, op);
  }

  // As target: tells the initiator how a frame of it ended. `offset`: Frame::slice_offset.
  void answer(FrameType type, const Frame& to, const absl::Status& status, uint64_t offset = 0);
  // As target: all bytes of a slice are visible.
  void arrived(const Frame& last, std::string_view notify, EventSink& sink);
  // As target: RegionTable::resolve() once per frame, and the same check of bounds for each of its
  // pieces; the table words the refusal. Returns the base of the region.
  absl::StatusOr<std::byte*> resolve(const Frame& frame, Access want,
                                     absl::Span<const WirePiece> pieces) const;
  // As initiator: the frame that asks for what comes next of a read, its pieces at `out`.
  Frame ask(OpenSlice& slot, size_t most_pieces, size_t most, char* out);
  // As initiator: the target's last word on a slice.
  void on_write_ack(const Frame& frame, std::string_view text, EventSink& sink);

  const ProviderContext& context_;
  const std::string peer_;  // "decode-0 (10.0.0.1:4000)"
  Properties properties_;
  OpenSlices slots_;
  uint32_t reads_open_ = 0;  // READ frames without their READ_END
  absl::Status failure_;
  bool failing_ = false;
  bool closed_ = false;
  bool inside_ = false;  // a call is on the stack that calls finish() itself

 private:
  const Time stall_;
  Time next_check_ = kNever;
  Time last_moved_{};
  uint64_t seen_moved_ = 0;
  bool looked_ = false;  // seen_moved_ is of this wait
};

// Encodes at `out` what the cursor yields, as far as one frame goes: so many bytes at most, and as
// many pieces as a receiver can land at once. Hands every piece to `each`. Pieces that follow each
// other at the target become one there.
template <typename Each>
void take_pieces(TransferCursor cursor, Frame& frame, size_t most_pieces, size_t most, char* out,
                 const Each& each) {
  WirePiece wire;
  Piece piece;
  for (size_t n = 0;
       n < most_pieces && frame.bytes < most && cursor.next(piece, most - frame.bytes); ++n) {
    each(piece);
    frame.bytes += static_cast<uint32_t>(piece.bytes);
    if (frame.pieces > 0 && wire.offset + wire.bytes == piece.remote_offset) {
      wire.bytes += static_cast<uint32_t>(piece.bytes);
    } else {
      wire = {piece.remote_offset, static_cast<uint32_t>(piece.bytes)};
      ++frame.pieces;
    }
    encode_piece(wire, out + (frame.pieces - 1) * kPieceBytes);
  }
}

// The peer's status in a kWriteAck or kReadEnd, safe for messages and terminals.
absl::Status status_of(const Frame& frame, std::string_view text);

}  // namespace baton::framed
