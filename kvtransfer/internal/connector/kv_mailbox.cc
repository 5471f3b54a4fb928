// Messages about loads over a worker's notifications: cut, sent, put together again.
#include "kvtransfer/internal/connector/kv_mailbox.h"

#include <utility>

namespace baton::kvtransfer {

bool KvMailbox::post(PeerId peer, const std::string& notification) {
  return !absl::IsResourceExhausted(worker_.notify_detached(peer, notification));
}

void KvMailbox::send(PeerId peer, KvMessageKind kind, uint64_t load, std::string_view body,
                     uint16_t version) {
  size_t offset = 0;
  do {
    encode_kv_part(kind, load, body, offset, scratch_, version);
    if (outbox_.has(peer_key(peer)) || !post(peer, scratch_)) {
      outbox_.add(peer_key(peer), {peer, scratch_});
    }
  } while (offset < body.size());
}

bool KvMailbox::flush() {
  return outbox_.go_on(
      [this](const Waiting& waiting) { return post(waiting.peer, waiting.notification); });
}

bool KvMailbox::receive(KvMessage& out) {
  const std::lock_guard lock(mutex_);
  if (inbox_.empty()) return take(out);
  out = std::move(inbox_.front());
  inbox_.pop_front();
  return true;
}

void KvMailbox::collect() {
  const std::lock_guard lock(mutex_);
  for (KvMessage message; take(message); message = {}) inbox_.push_back(std::move(message));
}

bool KvMailbox::take(KvMessage& out) {
  while (worker_.next_notification(notification_)) {
    KvMessagePart part;
    out.status = decode_kv_part(notification_.payload, part);
    out.peer = notification_.peer;
    out.kind = part.kind;
    out.version = part.version;
    out.load = part.load;
    if (!out.status.ok()) return true;
    absl::StatusOr<bool> whole = assemblers_[peer_key(out.peer)].add(part, out.body);
    out.status = whole.status();
    if (whole.ok() && !*whole) continue;
    if (!whole.ok() || out.kind != KvMessageKind::kProbe) return true;
    size_t offset = 0;
    encode_kv_part(KvMessageKind::kAlive, out.load, {}, offset, answer_);
    post(out.peer, answer_);  // without a slot: the next probe is answered
  }
  return false;
}

void KvMailbox::forget(PeerId peer) {
  {
    const std::lock_guard lock(mutex_);
    assemblers_.erase(peer_key(peer));
  }
  outbox_.erase_if(peer_key(peer), [](const Waiting&) { return true; });
}

}  // namespace baton::kvtransfer
