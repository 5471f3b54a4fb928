// Matching sends with receives, and moving what was matched.
#include "collectives/executor/point_to_point.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "collectives/executor/executor.h"
#include "transport/base/copies/copy_kernel.h"

namespace baton::collectives::executor {
namespace {

// Packets of one peer in a row.
constexpr int kPacketsInARow = 64;

size_t piece_bytes(const Call& call) {
  return call.geometry.part_elements * call.geometry.element_bytes;
}

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

bool takes(const Call& receive, const Packet& send) {
  return receive.tag == send.tag && receive.descriptor.of_v == send.of_v &&
         (send.of_v == 0 || receive.descriptor.whole() == send.whole);
}

template <typename T>
void remove(std::vector<T*>& from, const T* one) {
  from.erase(std::find(from.begin(), from.end(), one));
}

absl::Status invalid(std::string_view what) {
  return absl::InvalidArgumentError(
      absl::StrCat("the peer sent an invalid packet: ", std::string(what)));
}

}  // namespace

PointToPoint::PointToPoint(uint32_t rank, const std::vector<Link*>& links, Memory* memory,
                           FlightRecorder* recorder)
    : rank_(rank), links_(links), memory_(memory), recorder_(recorder), peers_(links.size()) {}

PointToPoint::~PointToPoint() {
  for (auto& flow : flows_) {
    if (flow->staged.data != nullptr) memory_->free(flow->staged);
    for (Piece& piece : flow->pieces) {
      if (piece.block.data != nullptr) memory_->free(piece.block);
    }
  }
  for (Blocks* blocks : {&send_blocks_, &receive_blocks_}) {
    for (const Block& block : blocks->spare) memory_->free(block);
  }
}

void PointToPoint::start(Call& call) {
  if (spare_.empty()) {
    flows_.push_back(std::make_unique<Flow>());
    spare_.push_back(flows_.back().get());
  }
  Flow& flow = *spare_.back();
  spare_.pop_back();
  flow.call = &call;
  flow.state = Flow::State::kNew;
  flow.taken = false;
  flow.peer = call.peer;
  flow.bytes = call.geometry.count * call.geometry.element_bytes;
  flow.granted = flow.finished = 0;
  if (call.sends) {
    flow.number = ++peers_[call.peer].sent;
    peers_[call.peer].sends.push_back(&flow);
  } else {
    flow.order = ++next_order_;
    fresh_.push_back(&flow);
  }
}

absl::StatusOr<bool> PointToPoint::advance(Time now) {
  if (idle()) return false;
  now_ = now;
  for (size_t i = 0; i < fresh_.size(); ++i) {
    if (absl::Status status = match_early(*fresh_[i]); !status.ok()) return status;
  }
  bool any = !fresh_.empty();
  fresh_.clear();
  for (uint32_t peer = 0; peer < peers_.size(); ++peer) {
    if (links_[peer] == nullptr) continue;
    const Peer& p = peers_[peer];
    if (p.sends.empty() && p.posted.empty() && p.matched.empty() && posted_any_.empty()) continue;
    absl::StatusOr<bool> moved = advance_peer(peer);
    if (!moved.ok()) return moved;
    any |= *moved;
  }
  return any;
}

absl::StatusOr<bool> PointToPoint::advance_peer(uint32_t peer) {
  Link& link = *links_[peer];
  Peer& p = peers_[peer];
  bool any = false;
  Packet packet;
  absl::Span<const std::byte> behind;
  for (int i = 0; i < kPacketsInARow && link.hear(packet, behind); ++i) {
    absl::Status status = on_packet(peer, packet, behind);
    link.heard();
    if (!status.ok()) return status;
    any = told_ = true;  // the peer may wait for room
  }
  for (size_t i = 0; i < p.sends.size();) {
    Flow& flow = *p.sends[i];
    const bool known = flow.state != Flow::State::kNew;
    absl::StatusOr<bool> moved = advance_send(flow);
    if (!moved.ok()) return moved;
    any |= *moved;
    if (over(flow)) {
      p.sends.erase(p.sends.begin() + static_cast<ptrdiff_t>(i));
      end(flow);
      any = true;
      continue;
    }
    if (!known && !*moved) break;  // later ones are told of later
    ++i;
  }
  for (size_t i = 0; i < p.matched.size();) {
    Flow& flow = *p.matched[i];
    absl::StatusOr<bool> moved = advance_receive(flow);
    if (!moved.ok()) return moved;
    any |= *moved;
    if (flow.taken) {
      p.matched.erase(p.matched.begin() + static_cast<ptrdiff_t>(i));
      end(flow);
      continue;
    }
    ++i;
  }
  return any;
}

// --- matching ---------------------------------------------------------------------------------

// Takes the first send that has come before this receive, or has the receive wait for one.
absl::Status PointToPoint::match_early(Flow& flow) {
  const Call& call = *flow.call;
  const bool from_any = flow.peer == kAnyPeer;
  Peer* from = nullptr;
  size_t found = 0;
  for (Peer& peer : peers_) {
    if (!from_any && &peer != &peers_[flow.peer]) continue;
    const auto early = std::find_if(peer.early.begin(), peer.early.end(),
                                    [&](const Early& one) { return takes(call, one.packet); });
    if (early == peer.early.end()) continue;
    if (from != nullptr && from->early[found].arrival < early->arrival) continue;
    from = &peer;
    found = static_cast<size_t>(early - peer.early.begin());
  }
  if (from == nullptr) {
    if (!from_any) links_[flow.peer]->expect();
    (from_any ? posted_any_ : peers_[flow.peer].posted).push_back(&flow);
    return absl::OkStatus();
  }
  const Early early = std::move(from->early[found]);
  from->early.erase(from->early.begin() + static_cast<ptrdiff_t>(found));
  return match(flow, static_cast<uint32_t>(from - peers_.data()), early.packet, early.bytes());
}

absl::Status PointToPoint::on_packet(uint32_t peer, const Packet& packet,
                                     absl::Span<const std::byte> behind) {
  Peer& p = peers_[peer];
  if (packet.kind == Packet::Kind::kSend) {
    if (packet.number != p.arrived + 1) {
      p.overtaken.push_back(
          {packet, {reinterpret_cast<const char*>(behind.data()), behind.size()}, 0});
      return absl::OkStatus();
    }
    if (absl::Status status = on_send(peer, packet, behind); !status.ok()) return status;
    for (size_t i = 0; i < p.overtaken.size();) {
      if (p.overtaken[i].packet.number != p.arrived + 1) {
        ++i;
        continue;
      }
      const Early next = std::move(p.overtaken[i]);
      p.overtaken.erase(p.overtaken.begin() + static_cast<ptrdiff_t>(i));
      if (absl::Status status = on_send(peer, next.packet, next.bytes()); !status.ok()) {
        return status;
      }
      i = 0;
    }
    return absl::OkStatus();
  }
  const bool ours = packet.kind != Packet::Kind::kPiece;  // about a send of ours
  std::vector<Flow*>& flows = ours ? p.sends : p.matched;
  const auto found = std::find_if(flows.begin(), flows.end(),
                                  [&](const Flow* flow) { return flow->number == packet.number; });
  if (found == flows.end()) return invalid("it is about no send");
  Flow& flow = **found;
  if (packet.kind == Packet::Kind::kTaken) {
    flow.taken = true;
    return absl::OkStatus();
  }
  const size_t each = piece_bytes(*flow.call);
  if (packet.length == 0 || packet.length > each || packet.count % each != 0 ||
      packet.count >= flow.bytes || packet.length > flow.bytes - packet.count) {
    return invalid("it is about no piece");
  }
  Piece& piece = flow.pieces[packet.count / each % kPieces];
  const bool expected = ours ? !piece.granted
                             : piece.granted && !piece.ready && piece.first == packet.count &&
                                   piece.bytes == packet.length;
  if (!expected) return invalid("it is about a piece at the wrong time");
  if (!behind.empty() && !piece.place.set(behind)) return invalid("its place is too long");
  if (ours) {
    piece.first = packet.count;
    piece.bytes = packet.length;
    piece.granted = true;
    piece.ready = false;
  } else {
    piece.ready = true;
  }
  return absl::OkStatus();
}

// The next send of this peer's: for a receive that waits, or to be kept.
absl::Status PointToPoint::on_send(uint32_t peer, const Packet& packet,
                                   absl::Span<const std::byte> behind) {
  Peer& p = peers_[peer];
  ++p.arrived;
  Flow* first = nullptr;
  for (std::vector<Flow*>* posted : {&p.posted, &posted_any_}) {
    const auto found = std::find_if(posted->begin(), posted->end(),
                                    [&](const Flow* flow) { return takes(*flow->call, packet); });
    if (found != posted->end() && (first == nullptr || (*found)->order < first->order)) {
      first = *found;
    }
  }
  if (first == nullptr) {
    p.early.push_back(
        {packet, {reinterpret_cast<const char*>(behind.data()), behind.size()}, ++next_arrival_});
    return absl::OkStatus();
  }
  remove(first->peer == kAnyPeer ? posted_any_ : p.posted, first);
  return match(*first, peer, packet, behind);
}

absl::Status PointToPoint::match(Flow& flow, uint32_t peer, const Packet& packet,
                                 absl::Span<const std::byte> behind) {
  Call& call = *flow.call;
  call.peer = flow.peer = peer;
  flow.number = packet.number;
  peers_[peer].matched.push_back(&flow);
  if (packet.count != call.geometry.count || packet.type != static_cast<uint8_t>(call.type)) {
    wrong_ = &call;
    const CallDescriptor theirs{.sequence = packet.number,
                                .count = packet.count,
                                .node_size = packet.whole,
                                .collective = static_cast<uint8_t>(Collective::kSendReceive),
                                .type = packet.type,
                                .of_v = packet.of_v};
    return absl::FailedPreconditionError(absl::StrCat(
        "the peer called ", theirs.to_string(), ": both ends must name the same count and type"));
  }
  switch (packet.data) {
    case Packet::kBehind:
      if (behind.size() != flow.bytes) return invalid("it has not the bytes that it says");
      if (flow.bytes > 0) std::memcpy(call.out, behind.data(), flow.bytes);
      flow.finished = flow.bytes;
      flow.state = Flow::State::kTelling;
      return absl::OkStatus();
    case Packet::kShown:
      flow.state = Flow::State::kReading;
      return flow.shown.set(behind) ? absl::OkStatus() : invalid("its place is too long");
    case Packet::kAsks:
      flow.state = Flow::State::kGranting;
      return absl::OkStatus();
  }
  return invalid("its bytes are nowhere");
}

// --- sends ------------------------------------------------------------------------------------

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
    if (!shown && link.reads() && flow.bytes <= piece_bytes(call)) {
      // Before it is matched, so that it costs no round more; not with the last blocks, for it may
      // have to wait for its receive.
      if (flow.staged.data == nullptr &&
          send_blocks_.made - send_blocks_.spare.size() < kMostBlocks / 2) {
        absl::StatusOr<Block> block = take(send_blocks_, piece_bytes(call));
        if (!block.ok()) return block.status();
        flow.staged = *block;
        if (block->data != nullptr) std::memcpy(block->data, call.in, flow.bytes);
      }
      shown = flow.staged.data != nullptr && link.show(flow.staged.data, flow.bytes, flow.shown);
    }
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
      absl::StatusOr<Block> block = take(send_blocks_, piece_bytes(*flow.call));
      if (!block.ok()) return block.status();
      if (block->data == nullptr) return false;
      piece.block = *block;
    }
    if (!piece.ready) std::memcpy(piece.block.data, source, piece.bytes);
    piece.ready = true;
    source = piece.block.data;
  }
  Packet packet;
  packet.kind = Packet::Kind::kPiece;
  packet.number = flow.number;
  packet.count = piece.first;
  packet.length = static_cast<uint32_t>(piece.bytes);
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
  const size_t bytes = std::min(piece_bytes(*flow.call), flow.bytes - flow.granted);
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
  const size_t each = piece_bytes(*flow.call);
  Piece& piece = flow.pieces[flow.granted / each % kPieces];
  if (piece.granted) return false;
  piece.first = flow.granted;
  piece.bytes = std::min(each, flow.bytes - flow.granted);
  piece.ready = false;
  piece.place.size = 0;
  if (!link.reads() && !link.grant(flow.call->out + piece.first, piece.bytes, piece.place)) {
    absl::StatusOr<Block> block = take(receive_blocks_, each);
    if (!block.ok()) return block.status();
    if (block->data == nullptr) return false;
    piece.block = *block;
    if (!link.grant(block->data, piece.bytes, piece.place)) {
      return absl::InternalError("memory of ours cannot be granted to the peer");
    }
  }
  Packet packet;
  packet.kind = Packet::Kind::kGrant;
  packet.number = flow.number;
  packet.count = piece.first;
  packet.length = static_cast<uint32_t>(piece.bytes);
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

// --- the rest ---------------------------------------------------------------------------------

void PointToPoint::end(Flow& flow) {
  give_back(send_blocks_, flow.staged);
  for (Piece& piece : flow.pieces) {
    give_back(send_blocks_, piece.block);  // a receive has none left
    piece.granted = piece.ready = false;
  }
  Call& call = *flow.call;
  flow.call = nullptr;
  spare_.push_back(&flow);
  call.pieces_done = call.pieces;
  if (call.on_done != nullptr) call.on_done(call, call.context);
}

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

Blocked PointToPoint::blocked() const {
  Blocked found;
  for (const auto& flow : flows_) {
    const Call* call = flow->call;
    if (call == nullptr) continue;
    if (found.call != nullptr && call != wrong_ &&
        found.call->descriptor.sequence <= call->descriptor.sequence) {
      continue;
    }
    const bool from_any = flow->peer == kAnyPeer;
    found = {.call = call,
             .piece = std::min(flow->finished / std::max<size_t>(1, piece_bytes(*call)),
                               call->pieces - 1),
             .peer = from_any ? rank_ : flow->peer,
             .to_send = call->sends,
             .from_any = from_any};
    if (call == wrong_) break;
  }
  return found;
}

void PointToPoint::record(FlightEvent::Kind kind, const Flow& flow) {
  if (recorder_ == nullptr) return;
  recorder_->record({.at = now_,
                     .kind = kind,
                     .collective = Collective::kSendReceive,
                     .peer = flow.peer,
                     .sequence = flow.call->descriptor.sequence,
                     .bytes = flow.bytes});
}

}  // namespace baton::collectives::executor
