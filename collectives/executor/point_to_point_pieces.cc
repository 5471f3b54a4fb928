// Moving what was matched: shown, granted, in pieces, and the blocks that pieces are copied
// through.
#include <algorithm>
#include <cstring>

#include "collectives/executor/executor.h"
#include "collectives/executor/point_to_point.h"
#include "transport/base/copies/copy_kernel.h"

namespace baton::collectives::executor {
namespace {

// A part of a message of `whole` bytes.
void move(std::byte* to, const std::byte* from, size_t bytes, size_t whole) {
  if (bytes == 0) return;
  if (whole < base::kStreamFrom) {
    std::memcpy(to, from, bytes);
    return;
  }
  base::stream_copy(to, from, bytes);
  base::stream_fence();
}

}  // namespace

size_t PointToPoint::block_bytes(const Call& call) {
  return call.geometry.part_elements * call.geometry.element_bytes;
}

// --- sends ------------------------------------------------------------------------------------

Packet PointToPoint::packet_of(Packet::Kind kind, const Flow& flow, const Piece& piece) {
  Packet packet;
  packet.kind = kind;
  packet.type = static_cast<uint8_t>(&piece - flow.pieces.data());
  packet.number = flow.number;
  packet.count = piece.first;
  packet.length = static_cast<uint32_t>(piece.bytes);
  return packet;
}

absl::StatusOr<bool> PointToPoint::advance_send(Flow& flow) {
  if (flow.state == Flow::State::kNew) return announce(flow);
  bool any = false;
  for (Piece& piece : flow.pieces) {
    if (!piece.granted) continue;
    absl::StatusOr<bool> sent = send_piece(flow, piece);
    if (!sent.ok()) return sent;
    any |= *sent;
  }
  return any;
}

absl::StatusOr<bool> PointToPoint::announce(Flow& flow) {
  const Call& call = *flow.call;
  Link& link = *links_[flow.peer];
  Packet packet;
  packet.kind = Packet::Kind::kSend;
  packet.type = static_cast<uint8_t>(call.type);
  packet.of_v = call.descriptor.of_v;
  packet.tag = call.tag;
  packet.number = flow.number;
  packet.count = call.geometry.count;
  packet.whole = call.descriptor.of_v != 0 ? call.descriptor.whole() : 0;
  absl::Span<const std::byte> behind(call.in, flow.bytes);
  if (flow.bytes > link.most_behind()) {
    bool shown = link.reads() && link.show(call.in, flow.bytes, flow.shown);
    if (!shown && link.reads() && flow.bytes <= block_bytes(call)) {
      // Before it is matched, so that it costs no round more; not with the last blocks, for it may
      // have to wait for its receive.
      if (flow.staged.data == nullptr &&
          send_blocks_.made - send_blocks_.spare.size() < kMostBlocks / 2) {
        absl::StatusOr<Block> block = take(send_blocks_, block_bytes(call));
        if (!block.ok()) return block.status();
        flow.staged = *block;
        if (block->data != nullptr) std::memcpy(block->data, call.in, flow.bytes);
      }
      shown = flow.staged.data != nullptr && link.show(flow.staged.data, flow.bytes, flow.shown);
    }
    if (!link.reads() && link.can_write(call.in, flow.bytes)) {
      flow.each = std::max(flow.each, kLongPiece);
    }
    packet.length = static_cast<uint32_t>(flow.each);
    packet.data = shown ? Packet::kShown : Packet::kAsks;
    behind = shown ? flow.shown.span() : absl::Span<const std::byte>();
  }
  if (!tell(flow.peer, packet, behind)) return false;
  flow.state = Flow::State::kUntaken;
  ++messages_;
  bytes_sent_ += flow.bytes;
  record(FlightEvent::Kind::kSend, flow);
  return true;
}

// A piece that the receiver has granted: written there, or shown.
absl::StatusOr<bool> PointToPoint::send_piece(Flow& flow, Piece& piece) {
  Link& link = *links_[flow.peer];
  if (piece.write != 0) {  // the one before it in this place
    if (!link.written(piece.write)) return false;
    piece.write = 0;
  }
  const std::byte* source = flow.call->in + piece.first;
  if (link.reads() || !link.can_write(source, piece.bytes)) {
    if (piece.block.data == nullptr) {
      absl::StatusOr<Block> block = take(send_blocks_, block_bytes(*flow.call));
      if (!block.ok()) return block.status();
      if (block->data == nullptr) return false;
      piece.block = *block;
    }
    if (!piece.ready) std::memcpy(piece.block.data, source, piece.bytes);
    piece.ready = true;
    source = piece.block.data;
  }
  const Packet packet = packet_of(Packet::Kind::kPiece, flow, piece);
  if (link.reads()) {
    Link::Place place;
    if (!link.show(source, piece.bytes, place)) {
      return absl::InternalError("memory of ours cannot be shown to the peer");
    }
    if (!tell(flow.peer, packet, place.span())) return false;
  } else {
    piece.write = link.write(source, piece.bytes, piece.place, packet);
    if (piece.write == 0) return false;
    told_ = true;
  }
  piece.granted = false;
  return true;
}

// Whether nothing of this send is needed any more.
bool PointToPoint::over(Flow& flow) {
  if (!flow.taken) return false;
  for (Piece& piece : flow.pieces) {
    if (piece.write == 0) continue;
    if (!links_[flow.peer]->written(piece.write)) return false;
    piece.write = 0;
  }
  return true;
}

// --- receives ---------------------------------------------------------------------------------

absl::StatusOr<bool> PointToPoint::advance_receive(Flow& flow) {
  bool any = false;
  if (flow.state == Flow::State::kReading) {
    absl::StatusOr<bool> moved = read(flow);
    if (!moved.ok()) return moved;
    any = *moved;
  }
  if (flow.state == Flow::State::kGranting) {
    // One copy at a time: others have their turn, and the wire.
    for (Piece& piece : flow.pieces) {
      if (!piece.ready) continue;
      absl::StatusOr<bool> finished = finish_piece(flow, piece);
      if (!finished.ok()) return finished;
      any |= *finished;
      if (*finished) break;
    }
    bool granted = true;
    while (granted) {
      absl::StatusOr<bool> more = grant(flow, any);
      if (!more.ok()) return more;
      granted = *more;
    }
    if (flow.finished == flow.bytes) flow.state = Flow::State::kTelling;
  }
  if (flow.state != Flow::State::kTelling) return any;
  Packet packet;
  packet.kind = Packet::Kind::kTaken;
  packet.number = flow.number;
  flow.taken = tell(flow.peer, packet, {});
  if (flow.taken) record(FlightEvent::Kind::kReceive, flow);
  return any || flow.taken;
}

// Copies a piece from where the sender has shown the whole.
absl::StatusOr<bool> PointToPoint::read(Flow& flow) {
  Link& link = *links_[flow.peer];
  const absl::StatusOr<const std::byte*> data = link.look(flow.shown, flow.bytes);
  if (!data.ok()) {
    // Its file may still be on its way to us.
    return absl::IsUnavailable(data.status()) ? absl::StatusOr<bool>(false) : data.status();
  }
  const size_t bytes = std::min(block_bytes(*flow.call), flow.bytes - flow.granted);
  move(flow.call->out + flow.granted, *data + flow.granted, bytes, flow.bytes);
  flow.granted += bytes;
  if (flow.granted < flow.bytes) return true;
  if (!link.looked_well(flow.bytes)) return false;  // a control message says why
  flow.finished = flow.bytes;
  flow.state = Flow::State::kTelling;
  return true;
}

// Grants the next piece; false if it has to wait.
absl::StatusOr<bool> PointToPoint::grant(Flow& flow, bool& any) {
  Link& link = *links_[flow.peer];
  Peer& peer = peers_[flow.peer];
  if (flow.granted == flow.bytes || peer.granted == kPieces) return false;
  Piece& piece = flow.pieces[flow.granted / flow.each % kPieces];
  if (piece.granted) return false;
  piece.first = flow.granted;
  piece.bytes = std::min(flow.each, flow.bytes - flow.granted);
  piece.ready = false;
  piece.place.size = 0;
  if (!link.reads() && !link.grant(flow.call->out + piece.first, piece.bytes, piece.place)) {
    absl::StatusOr<Block> block = take(receive_blocks_, flow.each);
    if (!block.ok()) return block.status();
    if (block->data == nullptr) return false;
    piece.block = *block;
    if (!link.grant(block->data, piece.bytes, piece.place)) {
      return absl::InternalError("memory of ours cannot be granted to the peer");
    }
  }
  const Packet packet = packet_of(Packet::Kind::kGrant, flow, piece);
  if (!tell(flow.peer, packet, piece.place.span())) {
    give_back(receive_blocks_, piece.block);
    return false;
  }
  piece.granted = true;
  ++peer.granted;
  flow.granted += piece.bytes;
  any = true;
  return true;
}

// A piece is here: in the output, or to be copied there.
absl::StatusOr<bool> PointToPoint::finish_piece(Flow& flow, Piece& piece) {
  Link& link = *links_[flow.peer];
  std::byte* to = flow.call->out + piece.first;
  if (link.reads()) {
    const absl::StatusOr<const std::byte*> data = link.look(piece.place, piece.bytes);
    if (!data.ok()) {
      return absl::IsUnavailable(data.status()) ? absl::StatusOr<bool>(false) : data.status();
    }
    move(to, *data, piece.bytes, flow.bytes);
    if (!link.looked_well(piece.bytes)) return false;
  } else if (piece.block.data != nullptr) {
    move(to, piece.block.data, piece.bytes, flow.bytes);
    give_back(receive_blocks_, piece.block);
  }
  piece.granted = piece.ready = false;
  --peers_[flow.peer].granted;
  flow.finished += piece.bytes;
  return true;
}

// --- blocks
// ---------------------------------------------------------------------------------------

absl::StatusOr<Block> PointToPoint::take(Blocks& blocks, size_t bytes) {
  if (!blocks.spare.empty()) {
    const Block block = blocks.spare.back();
    blocks.spare.pop_back();
    if (block.size >= bytes) return block;
    memory_->free(block);
    --blocks.made;
  }
  if (blocks.made == kMostBlocks) return Block{};
  absl::StatusOr<Block> block = memory_->allocate(bytes);
  if (block.ok()) {
    ++blocks.made;
  } else if (blocks.made > 0) {
    return Block{};  // those in use come back
  }
  return block;
}

void PointToPoint::give_back(Blocks& blocks, Block& block) {
  if (block.data != nullptr) blocks.spare.push_back(block);
  block = Block{};
}

bool PointToPoint::tell(uint32_t peer, const Packet& packet, absl::Span<const std::byte> behind) {
  if (!links_[peer]->tell(packet, behind)) return false;
  told_ = true;
  return true;
}

}  // namespace baton::collectives::executor
