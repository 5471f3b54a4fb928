// The requester's side of a queue pair: posting, sending, retrying, completing in order.
#include "tests/sim/fabric/queue_pair.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tests/sim/fabric/network.h"

namespace baton::sim {

QueuePair::QueuePair(SimNetwork& network, size_t node, size_t peer_node, size_t rail,
                     RegionTable& regions, QueuePairOwner& owner)
    : network_(network),
      node_(node),
      peer_node_(peer_node),
      rail_(rail),
      link_(network.link(node, peer_node, rail)),
      wire_(network.wire(node, peer_node, rail)),
      regions_(regions),
      owner_(owner),
      id_(network.add(this)),
      outgoing_(network.options().queue_depth),
      incoming_(network.options().queue_depth) {}

QueuePair::~QueuePair() { network_.remove(id_); }

void QueuePair::join(QueuePair& a, QueuePair& b) {
  a.peer_ = b.id_;
  b.peer_ = a.id_;
}

bool QueuePair::reachable() const {
  return link_.up() && network_.alive(node_) && network_.alive(peer_node_);
}

absl::Status QueuePair::acceptable(const WorkRequest& request) const {
  if (!ready_) return absl::FailedPreconditionError("posting to a queue pair that is broken");
  if (outstanding() == outgoing_.size()) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("posting beyond the queue depth of %u", outgoing_.size()));
  }
  if (request.op == WorkRequest::Op::kAdd) {
    if (request.atomic_offset % 8 != 0) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "an atomic at offset %u, which is not a multiple of 8", request.atomic_offset));
    }
    return absl::OkStatus();
  }
  const TransferDescriptor& transfer = *request.transfer;
  if (request.begin > request.end || request.end > transfer.bytes) {
    return absl::InvalidArgumentError(absl::StrFormat("bytes [%u, %u) of a transfer of %u bytes",
                                                      request.begin, request.end, transfer.bytes));
  }
  const size_t bytes = request.end - request.begin;
  if (bytes > network_.options().max_message) {
    return absl::InvalidArgumentError(absl::StrFormat("a message of %u bytes, the limit is %u",
                                                      bytes, network_.options().max_message));
  }
  if (bytes == 0) return absl::OkStatus();
  if (transfer.local_region >= regions_.entries().size()) {
    return absl::InvalidArgumentError("local memory that is not registered");
  }
  const RegionEntry& local = regions_.entries()[transfer.local_region];
  if (local.generation == 0 || local.base != transfer.local_base) {
    return absl::InvalidArgumentError("local memory that is not registered");
  }
  return transfer.local.check(local.size, "local");
}

absl::Status QueuePair::post(const WorkRequest& request) {
  if (absl::Status status = acceptable(request); !status.ok()) {
    network_.violation(absl::StrCat("node ", node_, ": ", status.message()));
    return status;
  }
  Outgoing& message = out(next_);
  const size_t bytes = request.op == WorkRequest::Op::kAdd ? 8 : request.end - request.begin;
  const size_t mtu = network_.options().mtu;
  message.request = request;
  message.packets = static_cast<uint32_t>(std::max<size_t>(1, (bytes + mtu - 1) / mtu));
  message.next = 0;
  message.acknowledged = false;
  if (request.op == WorkRequest::Op::kRead) message.received.reset(message.packets);
  if (next_ == first_) retries_ = 0;
  ++next_;
  last_activity_ = network_.now();
  offer(false);
  arm_timer();
  return absl::OkStatus();
}

void QueuePair::offer(bool responder) {
  if (offered_[responder]) return;
  offered_[responder] = true;
  wire_.offer(id_, responder);
}

size_t QueuePair::packet_bytes(const Outgoing& message, uint32_t index) const {
  if (message.request.op == WorkRequest::Op::kAdd) return 8;
  const size_t begin = message.request.begin + size_t{index} * network_.options().mtu;
  return std::min(network_.options().mtu, message.request.end - begin);
}

SimPacket QueuePair::packet(SimPacket::Kind kind, uint64_t message, uint32_t index) const {
  return {
      .kind = kind, .from = id_, .to = peer_, .epoch = epoch_, .message = message, .index = index};
}

bool QueuePair::next_packet(bool responder, SimPacket& packet, size_t& bytes) {
  const bool any = ready_ && network_.alive(node_) &&
                   (responder ? next_response(packet, bytes) : next_request(packet, bytes));
  if (!any) offered_[responder] = false;
  return any;
}

bool QueuePair::next_request(SimPacket& result, size_t& bytes) {
  for (; send_ < next_; ++send_) {
    Outgoing& message = out(send_);
    if (message.acknowledged) continue;
    switch (message.request.op) {
      case WorkRequest::Op::kRead:
      case WorkRequest::Op::kAdd:
        if (message.next != 0) continue;
        message.next = 1;
        bytes = 0;
        result = packet(message.request.op == WorkRequest::Op::kRead ? SimPacket::Kind::kReadRequest
                                                                     : SimPacket::Kind::kAdd,
                        send_, 0);
        return true;
      case WorkRequest::Op::kWrite:
        break;
    }
    QueuePair* target = network_.find(peer_);
    const Incoming* known = target != nullptr ? &target->in(send_) : nullptr;
    if (known != nullptr && (known->message != send_ || !known->refusal.ok())) known = nullptr;
    while (message.next < message.packets) {
      const uint32_t index = message.next++;
      // The last packet always goes: it asks for the acknowledgement.
      if (index + 1 < message.packets && known != nullptr && known->received.has(index)) continue;
      bytes = packet_bytes(message, index);
      result = packet(SimPacket::Kind::kWrite, send_, index);
      return true;
    }
  }
  return false;
}

void QueuePair::transmitted() { last_activity_ = network_.now(); }

void QueuePair::receive(const SimPacket& packet) {
  if (!ready_ || packet.epoch != epoch_) return;
  switch (packet.kind) {
    case SimPacket::Kind::kAck:
      acknowledge(packet.message);
      break;
    case SimPacket::Kind::kNak:
      refused(packet.message);
      break;
    case SimPacket::Kind::kReadResponse:
      take_response(packet);
      break;
    case SimPacket::Kind::kWrite:
    case SimPacket::Kind::kAdd:
    case SimPacket::Kind::kReadRequest:
      if (Outgoing* message = request_of_peer(packet)) execute(packet, *message);
      break;
  }
}

void QueuePair::acknowledge(uint64_t message) {
  if (message < first_ || message >= next_) return;
  last_activity_ = network_.now();
  out(message).acknowledged = true;
  while (first_ < next_ && out(first_).acknowledged) {
    const uint64_t id = out(first_).request.id;
    ++first_;
    send_ = std::max(send_, first_);
    owner_.completed(id, absl::OkStatus(), false);
  }
}

void QueuePair::refused(uint64_t message) {
  QueuePair* target = network_.find(peer_);
  if (message < first_ || message >= next_ || target == nullptr) return;
  const Incoming& incoming = target->in(message);
  if (incoming.message == message) fail(message, absl::Status(incoming.refusal), Break::kRefused);
}

void QueuePair::fail(uint64_t culprit, const absl::Status& cause, Break how) {
  if (how == Break::kLost) dead_ = true;
  if (!ready_) return;
  ready_ = false;
  const absl::Status flush = absl::UnavailableError(
      absl::StrCat("flushed, because the queue pair broke: ", cause.message()));
  while (first_ < next_) {
    const Outgoing& message = out(first_);
    const uint64_t number = first_++;
    // Where they are not lost, the two ends agree on what came before they go on.
    if (message.acknowledged || (number != culprit && how != Break::kLost && executed(number))) {
      owner_.completed(message.request.id, absl::OkStatus(), false);
    } else if (number == culprit) {
      owner_.completed(message.request.id, cause, false);
    } else {
      owner_.completed(message.request.id, flush, true);
    }
  }
  send_ = next_;
  owner_.broken(cause, how);
}

// Whether the other end has all of it; a write only.
bool QueuePair::executed(uint64_t number) {
  QueuePair* target = network_.find(peer_);
  if (target == nullptr || out(number).request.op == WorkRequest::Op::kRead) return false;
  const Incoming& incoming = target->in(number);
  return incoming.message == number && incoming.executed && incoming.refusal.ok();
}

void QueuePair::recover() {
  ++network_.stats().recoveries;
  QueuePair* other = network_.find(peer_);
  const uint32_t epoch = std::max(epoch_, other != nullptr ? other->epoch_ : 0) + 1;
  epoch_ = epoch;
  if (other != nullptr) {
    other->epoch_ = epoch;
    other->fail(kNone, absl::UnavailableError("the other end recovers from a refused access"),
                Break::kPeerRecovers);
  }
  SimNetwork& network = network_;
  network.at(network.now() + 2 * link_.spec.latency, [&network, id = id_, peer = peer_, epoch] {
    for (uint32_t end : {id, peer}) {
      QueuePair* queue_pair = network.find(end);
      if (queue_pair != nullptr && queue_pair->epoch_ == epoch) queue_pair->reset(epoch);
    }
  });
}

void QueuePair::reset(uint32_t epoch) {
  if (dead_) return;
  epoch_ = epoch;
  ready_ = true;
  retries_ = 0;
  for (Incoming& incoming : incoming_) incoming.message = kNone;
  reads_.clear();
  owner_.recovered();
}

uint64_t QueuePair::progress() const {
  const QueuePair* target = network_.find(peer_);
  return packets_taken_ + first_ + (target != nullptr ? target->packets_taken_ : 0);
}

// An administrator sets the timeout of a real adapter to suit the network.
Time QueuePair::timeout() const { return network_.options().ack_timeout + 2 * link_.spec.latency; }

void QueuePair::arm_timer() {
  if (timer_armed_ || first_ == next_) return;
  timer_armed_ = true;
  network_.at_timer(last_activity_ + timeout(), id_);
}

void QueuePair::on_timer() {
  timer_armed_ = false;
  if (!ready_ || first_ == next_ || !network_.alive(node_)) return;
  // What waits for a busy wire, there or here, is not lost.
  const QueuePair* target = network_.find(peer_);
  if (offered_[0] || (target != nullptr && target->offered_[1])) last_activity_ = network_.now();
  if (last_activity_ + timeout() > network_.now()) {
    arm_timer();
    return;
  }
  ++network_.stats().timeouts;
  if (progress() != progress_at_timeout_) retries_ = 0;
  progress_at_timeout_ = progress();
  if (retries_++ == network_.options().retry_count) {
    fail(absl::UnavailableError(absl::StrFormat(
        "retry count exceeded: node %u gave no acknowledgement after sending %u times", peer_node_,
        retries_)));
    return;
  }
  send_ = first_;
  for (uint64_t message = first_; message < next_; ++message) out(message).next = 0;
  last_activity_ = network_.now();
  offer(false);
  arm_timer();
}

}  // namespace baton::sim
