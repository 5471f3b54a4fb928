// The life of a rail that sends slices as frames, whatever carries them.
#include "transport/framed/rail.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace baton::framed {

absl::Status status_of(const Frame& frame, std::string_view text) {
  if (frame.code == absl::StatusCode::kOk) return absl::OkStatus();
  std::string message(text);
  for (char& c : message) {
    if (!absl::ascii_isprint(static_cast<unsigned char>(c))) c = '?';
  }
  if (message.empty() && frame.code == absl::StatusCode::kFailedPrecondition) {
    message =
        "the memory of the remote region is no longer mapped: its owner must keep it mapped until "
        "it has deregistered it";
  } else if (message.empty()) {
    message = "the remote region is stale: its owner deregistered it during the transfer";
  }
  // Only a rail itself may say that no side knows what became of a slice: when it is lost.
  const bool vague = frame.code == absl::StatusCode::kUnknown;
  return absl::Status(vague ? absl::StatusCode::kInternal : frame.code, message);
}

FramedRail::FramedRail(const ProviderContext& context, Time stall, std::string peer,
                       Properties properties)
    : context_(context),
      peer_(std::move(peer)),
      properties_(std::move(properties)),
      slots_(properties_.depth),
      stall_(stall) {}

bool FramedRail::post(const Slice& slice, EventSink& sink) {
  if (closed_ || failing_) return false;
  if (slice.begin == slice.end && slice.transfer->op == Op::kRead) {
    sink.slice_done(*this, slice.transfer->id, slice.index, absl::OkStatus());
    return true;
  }
  OpenSlice* slot = slots_.take(slice);
  if (slot == nullptr) return false;
  taken(*slot);
  return true;
}

void FramedRail::abort(TransferId transfer, EventSink& sink) {
  for (OpenSlice& slot : slots_) {
    if (closed_) return;
    if (!slot.live || slot.aborted || !(slot.id == transfer)) continue;
    if (slot.op == Op::kWrite && slot.begun) {
      // Bytes on the wire may land until the target has answered: wait for that.
      slot.aborted = true;
      release_memory(slot);
      continue;
    }
    take_back(slot);
    report(slot, absl::CancelledError("aborted"), sink);
  }
}

void FramedRail::close(absl::Status why, EventSink& sink) {
  if (!closed_ && !failing_ && !absl::IsUnavailable(why)) say_goodbye(std::string(why.message()));
  fail(std::move(why));
  if (!inside_) finish(sink);
}

void FramedRail::fail(absl::Status why) {
  if (failing_) return;
  failing_ = true;
  failure_ = std::move(why);
}

absl::Status FramedRail::lost(std::string_view why) const {
  return absl::UnavailableError(
      absl::StrCat("peer ", peer_, " over ", properties_.provider, ": ", std::string(why)));
}

void FramedRail::hostile(std::string_view what) { fail(absl::DataLossError(lost(what).message())); }

void FramedRail::hostile(FrameType type, std::string_view why) {
  hostile(absl::StrCat("hostile or damaged ", frame_name(type), " frame: ", std::string(why)));
}

void FramedRail::on_goodbye(const Frame& frame, std::string_view text) {
  const absl::Status said =
      status_of({.code = absl::StatusCode::kAborted, .text = frame.text}, text);
  fail(absl::AbortedError(
      lost(absl::StrCat("it closed the connection: ", said.message())).message()));
}

void FramedRail::finish(EventSink& sink) {
  if (closed_) return;
  closed_ = true;
  next_check_ = kNever;
  leave();
  if (failure_.ok()) failure_ = absl::CancelledError("closed");
  // The peer's error does not fail slices that another rail can still carry.
  absl::Status untouched = failure_;
  if (absl::IsDataLoss(failure_) || absl::IsAborted(failure_)) {
    untouched = absl::UnavailableError(failure_.message());
  }
  for (OpenSlice& slot : slots_) {
    if (!slot.live) continue;
    const bool may_have_landed = slot.op == Op::kWrite && slot.begun;
    report(slot, may_have_landed ? absl::UnknownError(failure_.message()) : untouched, sink);
  }
  sink.rail_down(*this, failure_);
}

void FramedRail::check_timers(Time now, EventSink& sink) {
  if (closed_) return;
  if (!waiting()) {
    next_check_ = kNever;
    return;
  }
  if (next_check_ == kNever) {
    // moved() may be a system call: most of what is waited for is here before it is needed.
    looked_ = false;
    last_moved_ = now;
    next_check_ = now + std::max<Time>(stall_ / 16, std::chrono::milliseconds(1));
    return;
  }
  if (now < next_check_) return;
  const uint64_t seen = moved();
  if (!std::exchange(looked_, true) || seen != seen_moved_) {
    seen_moved_ = seen;
    last_moved_ = now;
  }
  if (now - last_moved_ >= stall_) {
    stalled();
    fail(lost(
        absl::StrFormat("no progress for %.1f s with %u slices open: the peer has stopped reading "
                        "or is stopped, or the network is down or passes small packets only",
                        std::chrono::duration<double>(now - last_moved_).count(), slots_.live())));
    finish(sink);
    return;
  }
  next_check_ = now + std::max<Time>(stall_ / 4, std::chrono::milliseconds(1));
}

void FramedRail::answer(FrameType type, const Frame& to, const absl::Status& status,
                        uint64_t offset) {
  const std::string_view text(status.message().data(),
                              std::min<size_t>(status.message().size(), kMaxText));
  send_control({.type = type,
                .code = status.code(),
                .transfer = to.transfer,
                .slice = to.slice,
                .text = static_cast<uint32_t>(text.size()),
                .slice_offset = offset},
               text);
}

void FramedRail::arrived(const Frame& last, std::string_view notify, EventSink& sink) {
  sink.arrived(*this, {.transfer = last.transfer,
                       .slice = last.slice,
                       .slice_bytes = last.slice_bytes,
                       .total_bytes = last.total_bytes,
                       .counter_index = last.counter,
                       .counter_generation = last.counter_generation,
                       .increment = last.increment,
                       .notify = notify});
}

absl::StatusOr<std::byte*> FramedRail::resolve(const Frame& frame, Access want,
                                               absl::Span<const WirePiece> pieces) const {
  RegionTable& regions = context_.regions;
  auto base = regions.resolve(frame.region, frame.generation, frame.key, want, 0, 0);
  if (!base.ok()) return base;
  const uint64_t size = regions.entries()[frame.region].size;
  for (const WirePiece& piece : pieces) {
    if (piece.bytes > size || piece.offset > size - piece.bytes) {
      return regions.resolve(frame.region, frame.generation, frame.key, want, piece.offset,
                             piece.bytes);
    }
  }
  return base;
}

Frame FramedRail::ask(OpenSlice& slot, size_t most_pieces, size_t most, char* out) {
  const TransferDescriptor& t = *slot.transfer;
  Frame frame{.type = FrameType::kRead,
              .transfer = slot.id,
              .slice = slot.slice,
              .region = t.remote.index,
              .generation = t.remote.generation,
              .key = t.remote.key,
              .slice_offset = slot.framed};
  take_pieces({t.local, t.remote_layout, slot.begin + slot.framed, slot.end}, frame, most_pieces,
              most, out, [](const Piece&) {});
  slot.framed += frame.bytes;
  slot.begun = true;
  ++slot.reads_open;
  ++reads_open_;
  return frame;
}

void FramedRail::on_write_ack(const Frame& frame, std::string_view text, EventSink& sink) {
  OpenSlice* slot = find_slot(frame, Op::kWrite);
  if (slot == nullptr || !slot->said) {
    return hostile(FrameType::kWriteAck, "no such slice was sent");
  }
  report(*slot, slot->error.ok() ? status_of(frame, text) : slot->error, sink);
}

}  // namespace baton::framed
