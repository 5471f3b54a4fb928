// What arrives at a worker: counters that rise, notifications, and credit for those that were read.
#include <algorithm>
#include <utility>

#include "transport/internal/worker/staging.h"
#include "transport/internal/worker/core.h"

namespace baton::internal {
void WorkerCore::arrived(Rail& rail, const Arrival& arrival) {
  Peer* peer = peer_of(rail);
  if (peer == nullptr) return;
  peer->redial.give_up_at = kNever;  // it is there, and knows us
  auto complete = peer->arrivals.add(arrival);
  if (!complete.ok()) {
    doomed.push_back({peer->id(), &rail, complete.status()});
    return;
  }
  if (!complete->now) return;
  if (arrival.counter_index == CounterTable::kCredits) return take_credit(*peer, arrival.increment);
  if (arrival.counter_index == CounterTable::kControl) {
    return hear(*peer, rail, complete->notify);
  }
  if (arrival.counter_index == CounterTable::kStaging) {
    return staging_for_device_memory().hear(*peer, rail, complete->notify);
  }
  if (arrival.counter_generation != 0) {
    counters.add(arrival.counter_index, arrival.counter_generation, arrival.increment);
    wakeups.signal();
  }
  if (!complete->notify.empty()) push_notification(peer->id(), complete->notify);
}

void WorkerCore::push_notification(PeerId from, std::string_view payload) {
  Peer* peer = find_peer(from);
  if (peer == nullptr) return;
  const uint64_t cost = payload.size() + kNotificationCost;
  // Twice the window: a credit that the peer took back may belong to one that arrived after all.
  if (peer->unread + cost > 2 * kNotificationWindow) {
    if (!peer->rails.empty()) {
      doomed.push_back(
          {from, peer->rails.front().rail.get(),
           absl::InvalidArgumentError("the peer sent more notifications than it had credit for")});
    }
    return;
  }
  peer->unread += cost;
  if (peer->state == PeerState::kDown) left_behind += cost;
  if (inbox_count == inbox.size()) {
    std::rotate(inbox.begin(), inbox.begin() + static_cast<ptrdiff_t>(inbox_head), inbox.end());
    inbox_head = 0;
    inbox.resize(std::max<size_t>(64, 2 * inbox.size()));
  }
  Notification& slot = inbox[(inbox_head + inbox_count) % inbox.size()];
  slot.peer = from;
  slot.payload.assign(payload);
  ++inbox_count;
  wakeups.signal();
}

bool WorkerCore::next_notification(Notification& out) {
  if (inbox_count == 0) return false;
  Notification& next = inbox[inbox_head];
  out.peer = next.peer;
  out.payload.swap(next.payload);
  inbox_head = (inbox_head + 1) % inbox.size();
  --inbox_count;
  notification_read(out);
  return true;
}

void WorkerCore::notification_read(const Notification& notification) {
  Peer* peer = find_peer(notification.peer);
  const uint64_t cost = notification.payload.size() + kNotificationCost;
  if (peer == nullptr) return;  // cannot be: it is not forgotten before this
  peer->unread -= std::min(cost, peer->unread);
  if (peer->state == PeerState::kDown) {
    left_behind -= std::min(cost, left_behind);
    if (peer->unread == 0) peers.all_read(*peer);
    return;
  }
  peer->untold += cost;
  owe(*peer);
}

// What the application has read goes back to those who sent it, a quarter of the window at a time.
// A peer that is lost gets it when it is back.
void WorkerCore::owe(Peer& peer) {
  if (peer.state != PeerState::kUp || peer.untold < kNotificationWindow / 4) return;
  if (!std::exchange(peer.creditor, true)) creditors.push_back(&peer);
  credits_due = true;
  wakeups.wake();
}

// A credit is a transfer of no bytes whose counter is none. One that finds no slot waits for the
// end of another.
bool WorkerCore::give_credits() {
  if (!std::exchange(credits_due, false)) return false;
  for (; !creditors.empty(); creditors.pop_back()) {
    Peer& peer = *creditors.back();
    peer.creditor = false;
    if (peer.state != PeerState::kUp || peer.untold == 0) continue;
    absl::StatusOr<TransferId> id = slots.acquire();
    const bool reserved = id->generation == 0;
    if (reserved) id = slots.acquire_reserved();
    if (!id.ok()) {
      peer.creditor = true;
      return true;
    }
    TransferSlot& slot = slots[id->slot];
    slot.descriptor = TransferDescriptor{.id = *id,
                                         .counter = {peer.uid, CounterTable::kCredits, 1},
                                         .increment = std::exchange(peer.untold, 0)};
    slot.peer = peer.id();
    slot.local = {};
    slot.deadline = kNever;
    slot.on_end = nullptr;
    slot.detached = !reserved;
    slot.control = true;
    activate(id->slot);
  }
  return true;
}

// From the peer, or back from a notification that was not delivered.
void WorkerCore::take_credit(Peer& peer, uint64_t amount) {
  peer.credit += std::min(amount, kNotificationWindow - peer.credit);
  while (peer.held.head != kNone) {
    const uint32_t index = peer.held.head;
    TransferSlot& slot = slots[index];
    const uint64_t cost = slot.descriptor.notify.size() + kNotificationCost;
    if (peer.credit < cost) return;
    dequeue(peer, index);
    peer.credit -= slot.credit = cost;
    slot.held = false;
    enqueue(peer, index);
  }
}

}  // namespace baton::internal
