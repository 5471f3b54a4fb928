// Turns control messages and credit into transfers of no bytes.
#include "transport/internal/worker/control_outbox.h"

#include <algorithm>
#include "transport/internal/worker/core.h"

namespace baton::internal {

ControlOutbox::ControlOutbox(WorkerCore& core) : core_(core) {
  // Room now, so that the hot path does not allocate later.
  creditors_.reserve(64);
}

void ControlOutbox::say(Peer& peer, const ControlMessage& message) {
  std::pair<PeerId, std::string> entry(peer.id(), message.encode());
  if (peer.unsaid > 0 && std::find(messages_.begin(), messages_.end(), entry) != messages_.end()) {
    return;
  }
  messages_.push_back(std::move(entry));
  messages_due_ = true;
  ++peer.unsaid;
}

void ControlOutbox::drop_messages(Peer& peer) {
  if (std::exchange(peer.unsaid, 0) == 0) return;
  std::erase_if(messages_, [&](const auto& entry) { return entry.first == peer.id(); });
}

void ControlOutbox::owe(Peer& peer) {
  if (peer.state != PeerState::kUp || peer.untold < kNotificationWindow / 4) return;
  if (!std::exchange(peer.creditor, true)) creditors_.push_back(&peer);
  credits_due_ = true;
  core_.wakeups.wake();
}

void ControlOutbox::credit_failed(Peer& peer, uint64_t amount) {
  peer.untold += amount;
  owe(peer);
}

void ControlOutbox::slot_freed() {
  credits_due_ |= !creditors_.empty();
  messages_due_ |= !messages_.empty();
}

uint32_t ControlOutbox::next() {
  const uint32_t credit = credits_due_ ? next_credit() : TransferSlot::kNone;
  return credit != TransferSlot::kNone || !messages_due_ ? credit : next_message();
}

uint32_t ControlOutbox::next_credit() {
  while (!creditors_.empty()) {
    Peer& peer = *creditors_.back();
    const bool wanted = peer.state == PeerState::kUp && peer.untold > 0;
    absl::StatusOr<TransferId> id;
    bool reserved = false;
    if (wanted) {
      id = core_.slots.acquire();
      reserved = id->generation == 0;
      if (reserved) id = core_.slots.acquire_reserved();
      if (!id.ok()) break;
    }
    peer.creditor = false;
    creditors_.pop_back();
    if (!wanted) continue;
    TransferSlot& slot = core_.slots[id->slot];
    slot.fill_control({.id = *id,
                       .counter = {peer.uid, CounterTable::kCredits, 1},
                       .increment = std::exchange(peer.untold, 0)},
                      peer.id());
    slot.detached = !reserved;
    return id->slot;
  }
  credits_due_ = false;
  return TransferSlot::kNone;
}

// In slots that no caller can have taken.
uint32_t ControlOutbox::next_message() {
  while (!messages_.empty()) {
    Peer* peer = core_.peers.find(messages_.front().first);
    const bool wanted = peer != nullptr && peer->state != PeerState::kDown;
    absl::StatusOr<TransferId> id;
    if (wanted && !(id = core_.slots.acquire_reserved()).ok()) break;
    std::string words = std::move(messages_.front().second);
    messages_.pop_front();
    if (peer != nullptr && peer->unsaid > 0) --peer->unsaid;
    if (!wanted) continue;
    TransferSlot& slot = core_.slots[id->slot];
    slot.notify_heap = std::move(words);
    slot.fill_control(
        {.id = *id, .counter = {peer->uid, CounterTable::kControl, 1}, .notify = slot.notify_heap},
        peer->id());
    return id->slot;
  }
  messages_due_ = false;
  return TransferSlot::kNone;
}

}  // namespace baton::internal
