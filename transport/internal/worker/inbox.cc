// Keeps notifications and peer events until the application reads them.
#include "transport/internal/worker/inbox.h"

#include <algorithm>
#include <utility>
#include "transport/internal/worker/core.h"

namespace baton::internal {

void Inbox::push(Peer& peer, std::string_view payload) {
  const uint64_t cost = payload.size() + kNotificationCost;
  // Twice the window: a notification may have arrived although the peer took its credit back.
  if (peer.unread + cost > 2 * kNotificationWindow) {
    if (!peer.rails.empty()) {
      core_.closing.close_later(
          peer.id(), peer.rails.front().rail.get(),
          absl::InvalidArgumentError("the peer sent more notifications than it had credit for"));
    }
    return;
  }
  peer.unread += cost;
  if (peer.state == PeerState::kDown) left_behind_ += cost;
  if (count_ == ring_.size()) {
    std::rotate(ring_.begin(), ring_.begin() + static_cast<ptrdiff_t>(head_), ring_.end());
    head_ = 0;
    ring_.resize(std::max<size_t>(64, 2 * ring_.size()));
  }
  Notification& slot = ring_[(head_ + count_) % ring_.size()];
  slot.peer = peer.id();
  slot.payload.assign(payload);
  ++count_;
  core_.wakeups.signal();
}

bool Inbox::next(Notification& out) {
  if (count_ == 0) return false;
  Notification& next = ring_[head_];
  out.peer = next.peer;
  out.payload.swap(next.payload);
  head_ = (head_ + 1) % ring_.size();
  --count_;
  was_read(out);
  return true;
}

void Inbox::was_read(const Notification& notification) {
  Peer* peer = core_.peers.find(notification.peer);
  const uint64_t cost = notification.payload.size() + kNotificationCost;
  if (peer == nullptr) return;  // cannot be: it is not forgotten before this
  peer->unread -= std::min(cost, peer->unread);
  if (peer->state == PeerState::kDown) {
    left_behind_ -= std::min(cost, left_behind_);
    if (peer->unread == 0) core_.peers.all_read(*peer);
    return;
  }
  peer->untold += cost;
  core_.outbox.owe(*peer);
}

void Inbox::push_event(PeerEvent event) {
  Peer* peer = core_.peers.find(event.peer);
  if (peer != nullptr && peer->events == kUnreadEvents) {
    const auto last = std::find_if(events_.rbegin(), events_.rend(), [&](const PeerEvent& other) {
      return other.peer == event.peer;
    });
    event.missed = last->missed + 1;
    *last = std::move(event);
  } else {
    if (peer != nullptr) ++peer->events;
    events_.push_back(std::move(event));
  }
  core_.wakeups.signal();
}

bool Inbox::next_event(PeerEvent& out) {
  if (events_.empty()) return false;
  out = std::move(events_.front());
  events_.pop_front();
  if (Peer* peer = core_.peers.find(out.peer); peer != nullptr) --peer->events;
  return true;
}

void Inbox::forget_events(const Peer& peer) {
  std::erase_if(events_, [&](const PeerEvent& event) { return event.peer.index == peer.index; });
}

}  // namespace baton::internal
