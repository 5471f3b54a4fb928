// Matching sends with receives, and their beginning and end.
#include "collectives/executor/point_to_point.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "collectives/executor/executor.h"

namespace baton::collectives::executor {
namespace {

// Packets of one peer in a row.
constexpr int kPacketsInARow = 64;

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
  flow.each = block_bytes(call);
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
  if (packet.type >= kPieces || packet.length == 0 || packet.length > flow.each ||
      packet.count >= flow.bytes || packet.length > flow.bytes - packet.count) {
    return invalid("it is about no piece");
  }
  Piece& piece = flow.pieces[packet.type];
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
      if (behind.size() != flow.bytes)
        return invalid("its length differs from the length in its header");
      if (flow.bytes > 0) std::memcpy(call.out, behind.data(), flow.bytes);
      flow.finished = flow.bytes;
      flow.state = Flow::State::kTelling;
      return absl::OkStatus();
    case Packet::kShown:
      flow.state = Flow::State::kReading;
      return flow.shown.set(behind) ? absl::OkStatus() : invalid("its place is too long");
    case Packet::kAsks: {
      flow.state = Flow::State::kGranting;
      Link::Place place;
      const size_t most = std::min<size_t>(packet.length, kLongPiece);
      if (most > flow.each && links_[peer]->grant(call.out, flow.bytes, place)) flow.each = most;
      return absl::OkStatus();
    }
  }
  return invalid("its bytes are nowhere");
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
             .piece = std::min(flow->finished / std::max<size_t>(1, block_bytes(*call)),
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
