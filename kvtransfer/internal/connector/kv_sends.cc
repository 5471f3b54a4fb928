// Transfers of KV under way: submits them, follows them, frees their slots.
#include "kvtransfer/internal/connector/kv_sends.h"

#include <algorithm>
#include <utility>

#include "kvtransfer/internal/connector/kv_mailbox.h"

namespace baton::kvtransfer {

void KvSends::begin(KvFlow& flow, uint32_t layer, const KvMove& move) {
  KvSend* send = nullptr;
  if (spare_.empty()) {
    send = &all_.emplace_back();
  } else {
    send = spare_.back();
    spare_.pop_back();
  }
  send->flow = &flow;
  send->move = move;
  send->layer = layer;
  send->place = static_cast<uint32_t>(flow.open.size());
  flow.open.push_back(send);
  const uint64_t peer = peer_key(flow.peer);
  if (waiting_.has(peer) || !submit(*send)) waiting_.add(peer, send);
}

bool KvSends::submit(KvSend& send) {
  TransferRequest request;
  request.op = op_;
  request.peer = send.flow->peer;
  request.on_end = &KvSends::on_end;
  request.context = &send;
  owner_.fill(send, request);
  send.owner = this;
  send.begin = clock_.now();
  const absl::StatusOr<TransferId> id = worker_.submit(request);
  if (absl::IsResourceExhausted(id.status())) return false;
  if (!id.ok()) {
    KvFlow& flow = *send.flow;
    leave_flow(send);
    put_back(send);
    owner_.on_refused(flow, id.status());
    return true;
  }
  send.id = *id;
  send.submitted = true;
  ++open_;
  return true;
}

void KvSends::leave_flow(KvSend& send) {
  std::vector<KvSend*>& open = send.flow->open;
  open.back()->place = send.place;
  open[send.place] = open.back();
  open.pop_back();
}

void KvSends::put_back(KvSend& send) {
  send = KvSend();
  spare_.push_back(&send);
}

void KvSends::stop(KvFlow& flow) {
  if (std::any_of(flow.open.begin(), flow.open.end(),
                  [](const KvSend* send) { return !send->submitted; })) {
    waiting_.erase_if(peer_key(flow.peer), [&](KvSend* send) { return send->flow == &flow; });
  }
  for (size_t i = flow.open.size(); i-- > 0;) {
    KvSend& send = *flow.open[i];
    if (send.submitted) {
      worker_.cancel(send.id).IgnoreError();  // one that has ended is as good as cancelled
    } else {
      leave_flow(send);
      put_back(send);
    }
  }
}

void KvSends::on_end(void* context, TransferId /*id*/, const absl::Status& status) {
  KvSend& send = *static_cast<KvSend*>(context);
  KvSends& sends = *send.owner;
  send.end = sends.clock_.now();
  send.status = status;
  send.next = sends.arrived_.load(std::memory_order_relaxed);
  while (!sends.arrived_.compare_exchange_weak(send.next, &send, std::memory_order_release,
                                               std::memory_order_relaxed)) {
  }
}

bool KvSends::progress() {
  KvSend* send = arrived_.exchange(nullptr, std::memory_order_acquire);
  const size_t before = ended_.size();
  for (; send != nullptr; send = send->next) ended_.push_back(send);
  std::reverse(ended_.begin() + static_cast<std::ptrdiff_t>(before), ended_.end());
  bool any = false;
  for (size_t i = 0; i < ended_.size();) {
    send = ended_[i];
    // The end is announced a moment before the slot can be given back.
    if (absl::IsFailedPrecondition(worker_.release(send->id))) {
      ++i;
      continue;
    }
    std::swap(ended_[i], ended_.back());
    ended_.pop_back();
    --open_;
    leave_flow(*send);
    owner_.on_ended(*send);
    put_back(*send);
    any = true;
  }
  any |= waiting_.go_on([this](KvSend* waiting) { return submit(*waiting); });
  return any;
}

}  // namespace baton::kvtransfer
