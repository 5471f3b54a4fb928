// The responder's side of a queue pair: checking, executing and answering what the peer requests.
#include <atomic>
#include <cstring>

#include "tests/sim/fabric/network.h"
#include "tests/sim/fabric/queue_pair.h"
#include "transport/base/copies/fault_guard.h"

namespace baton::sim {

QueuePair::Outgoing* QueuePair::request_of_peer(const SimPacket& packet) {
  QueuePair* peer = network_.find(packet.from);
  if (peer == nullptr || !peer->ready_ || peer->epoch_ != packet.epoch ||
      packet.message < peer->first_ || packet.message >= peer->next_) {
    return nullptr;  // a late copy of something that has completed
  }
  return &peer->out(packet.message);
}

// Every byte that the request touches there lies in a region that allows it.
absl::Status QueuePair::check_remote(const WorkRequest& request, size_t begin, size_t end) {
  const RemoteRegion& remote = request.transfer->remote;
  if (request.op == WorkRequest::Op::kAdd) {
    return regions_
        .resolve(remote.index, remote.generation, remote.key, Access::kRemoteReadWrite,
                 request.atomic_offset, 8)
        .status();
  }
  const Access want =
      request.op == WorkRequest::Op::kRead ? Access::kRemoteRead : Access::kRemoteWrite;
  TransferCursor cursor(request.transfer->local, request.transfer->remote_layout, begin, end);
  Piece piece;
  while (cursor.next(piece)) {
    auto at = regions_.resolve(remote.index, remote.generation, remote.key, want,
                               piece.remote_offset, piece.bytes);
    if (!at.ok()) return at.status();
  }
  return absl::OkStatus();
}

// Moves bytes [begin, end) of the transfer. Resolves again: the region may have gone meanwhile.
absl::Status QueuePair::copy(const WorkRequest& request, size_t begin, size_t end,
                             RegionTable& table) {
  const TransferDescriptor& transfer = *request.transfer;
  const RemoteRegion& remote = transfer.remote;
  const bool read = request.op == WorkRequest::Op::kRead;
  TransferCursor cursor(transfer.local, transfer.remote_layout, begin, end);
  Piece piece;
  while (cursor.next(piece)) {
    auto at = table.resolve(remote.index, remote.generation, remote.key,
                            read ? Access::kRemoteRead : Access::kRemoteWrite, piece.remote_offset,
                            piece.bytes);
    if (!at.ok()) return at.status();
    std::byte* local = transfer.local_base + piece.local_offset;
    const bool there =
        base::guarded([&] { std::memmove(read ? local : *at, read ? *at : local, piece.bytes); });
    if (!there) {
      return absl::FailedPreconditionError(
          "memory of this transfer is no longer mapped: keep memory mapped until it is "
          "deregistered");
    }
  }
  return absl::OkStatus();
}

void QueuePair::execute(const SimPacket& request, Outgoing& message) {
  Incoming& incoming = in(request.message);
  const auto answer = [&] {
    if (incoming.refusal.ok()) network_.before_ack(node_, peer_node_, rail_);
    wire_.send_control(packet(incoming.refusal.ok() ? SimPacket::Kind::kAck : SimPacket::Kind::kNak,
                              request.message, 0));
  };
  if (incoming.message != request.message) {
    // Checked as a whole before a byte moves, whichever packet comes first.
    incoming.message = request.message;
    incoming.executed = false;
    incoming.responding = false;
    incoming.received.reset(message.packets);
    incoming.refusal = check_remote(message.request, message.request.begin, message.request.end);
  }
  if (incoming.executed || !incoming.refusal.ok()) {
    answer();  // again: the first answer may be lost
    return;
  }
  switch (request.kind) {
    case SimPacket::Kind::kWrite:
      execute_write(request, message, incoming);
      break;
    case SimPacket::Kind::kAdd:
      execute_add(request, message, incoming);
      break;
    default:
      if (!incoming.responding) {
        incoming.responding = true;
        incoming.next = 0;
        reads_.push_back(request.message);
        offer(true);
      }
      return;
  }
  if (incoming.executed || !incoming.refusal.ok()) answer();
}

void QueuePair::execute_write(const SimPacket& request, const Outgoing& message,
                              Incoming& incoming) {
  if (incoming.received.has(request.index)) return;
  const WorkRequest& work = message.request;
  const TransferDescriptor& transfer = *work.transfer;
  const size_t begin = work.begin + size_t{request.index} * network_.options().mtu;
  incoming.refusal = copy(work, begin, begin + packet_bytes(message, request.index), regions_);
  if (!incoming.refusal.ok()) return;
  incoming.received.add(request.index);
  ++packets_taken_;
  if (incoming.received.count < message.packets) return;
  incoming.executed = true;
  owner_.landed({.transfer = transfer.id,
                 .slice = work.slice,
                 .slice_bytes = work.end - work.begin,
                 .total_bytes = transfer.bytes,
                 .counter_index = transfer.counter.index,
                 .counter_generation = transfer.counter.generation,
                 .increment = transfer.increment,
                 .notify = work.end == transfer.bytes ? transfer.notify : std::string_view()});
}

void QueuePair::execute_add(const SimPacket& request, const Outgoing& message, Incoming& incoming) {
  const WorkRequest& work = message.request;
  const RemoteRegion& remote = work.transfer->remote;
  auto at = regions_.resolve(remote.index, remote.generation, remote.key, Access::kRemoteReadWrite,
                             work.atomic_offset, 8);
  incoming.refusal = at.status();
  if (!at.ok()) return;
  uint64_t word = 0;
  std::memcpy(&word, *at, sizeof word);
  word += work.atomic_amount;
  std::memcpy(*at, &word, sizeof word);
  incoming.received.add(request.index);
  incoming.executed = true;
  ++packets_taken_;
}

bool QueuePair::next_response(SimPacket& result, size_t& bytes) {
  while (!reads_.empty()) {
    const uint64_t number = reads_.front();
    Incoming& incoming = in(number);
    SimPacket request{.from = peer_, .epoch = epoch_, .message = number};
    const Outgoing* message = request_of_peer(request);
    if (incoming.message == number && message != nullptr) {
      while (incoming.next < message->packets) {
        const uint32_t index = incoming.next++;
        if (message->received.has(index)) continue;
        bytes = packet_bytes(*message, index);
        result = packet(SimPacket::Kind::kReadResponse, number, index);
        return true;
      }
    }
    if (incoming.message == number) incoming.responding = false;
    reads_.pop_front();
  }
  return false;
}

// At the requester: bytes of a read have come.
void QueuePair::take_response(const SimPacket& response) {
  const uint64_t number = response.message;
  QueuePair* target = network_.find(response.from);
  if (target == nullptr || number < first_ || number >= next_) return;
  Outgoing& message = out(number);
  if (message.acknowledged || message.received.has(response.index)) return;
  const size_t begin = message.request.begin + size_t{response.index} * network_.options().mtu;
  const absl::Status status =
      copy(message.request, begin, begin + packet_bytes(message, response.index), target->regions_);
  if (!status.ok()) {
    fail(number, status, Break::kRefused);
    return;
  }
  message.received.add(response.index);
  ++packets_taken_;
  last_activity_ = network_.now();
  if (message.received.count == message.packets) acknowledge(number);
}

}  // namespace baton::sim
