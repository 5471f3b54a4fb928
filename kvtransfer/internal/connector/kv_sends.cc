// Transfers of KV under way: submits them, follows them, frees their slots.
#include "kvtransfer/internal/connector/kv_sends.h"

#include <algorithm>

namespace baton::kvtransfer {

KvSend& KvSends::take() {
  if (spare_.empty()) return all_.emplace_back();
  KvSend& send = *spare_.back();
  spare_.pop_back();
  return send;
}

void KvSends::put_back(KvSend& send) {
  send = KvSend();
  spare_.push_back(&send);
}

absl::Status KvSends::submit(KvSend& send, TransferRequest& request) {
  request.on_end = &KvSends::on_end;
  request.context = &send;
  send.owner = this;
  send.begin = clock_.now();
  absl::StatusOr<TransferId> id = worker_.submit(request);
  if (!id.ok()) return id.status();
  send.id = *id;
  send.submitted = true;
  ++open_;
  return absl::OkStatus();
}

void KvSends::cancel(KvSend& send) {
  // A transfer that has ended meanwhile is as good as cancelled.
  worker_.cancel(send.id).IgnoreError();
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

void KvSends::gather_ended() {
  KvSend* send = arrived_.exchange(nullptr, std::memory_order_acquire);
  const size_t before = ended_.size();
  for (; send != nullptr; send = send->next) ended_.push_back(send);
  std::reverse(ended_.begin() + static_cast<std::ptrdiff_t>(before), ended_.end());
}

}  // namespace baton::kvtransfer
