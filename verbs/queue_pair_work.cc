// The work of a queue pair: posting, the doorbell, completions, receives and their credits.
#include <arpa/inet.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "transport/base/copies/fault_guard.h"
#include "verbs/queue_pair.h"

namespace baton::verbs {

void QueuePair::post_receives(const uint32_t* slots, size_t count) {
  if (pool_ != nullptr) return pool_->post(slots, count);
  std::array<ibv_recv_wr, kChain> requests;
  std::array<ibv_sge, kChain> sges;
  while (count > 0 && !broken_) {
    const size_t n = std::min(count, kChain);
    for (size_t i = 0; i < n; ++i) {
      sges[i] = {.addr = reinterpret_cast<uintptr_t>(received_at(slots[i])),
                 .length = kMessageBytes,
                 .lkey = registration_->lkey};
      requests[i] = {.wr_id = kReceiveId | slots[i],
                     .next = i + 1 < n ? &requests[i + 1] : nullptr,
                     .sg_list = &sges[i],
                     .num_sge = 1};
    }
    ibv_recv_wr* bad = nullptr;
    if (ibv_post_recv(queue_pair_, requests.data(), &bad) != 0) {
      posted_receives_ += static_cast<uint32_t>(bad - requests.data());
      break_off();
      return;
    }
    posted_receives_ += static_cast<uint32_t>(n);
    slots += n;
    count -= n;
  }
}

ibv_send_wr& QueuePair::next_request() {
  if (chain_ == kChain) ring();
  return requests_[chain_];
}

void QueuePair::add_record(ibv_send_wr& request, const Record& done) {
  request.wr_id = next_;
  request.next = nullptr;
  if (chain_ > 0) requests_[chain_ - 1].next = &request;
  record(next_++) = done;
  inflight_bytes_ += done.bytes;
  ++chain_;
}

// Inline bytes are read by the processor, in the driver's code, where no handler can catch a fault.
// What is not mapped any more is left to the adapter, which has its pages.
template <typename Posted>
bool QueuePair::inlined(const Posted& work, absl::Span<const ibv_sge> sges, size_t bytes) const {
  if (work.opcode == IBV_WR_RDMA_READ || bytes > max_inline_ || !work.host_memory) return false;
  return work.stays || std::all_of(sges.begin(), sges.end(), [](const ibv_sge& sge) {
           return base::readable(reinterpret_cast<const std::byte*>(sge.addr), sge.length);
         });
}

void QueuePair::add(const Work& work) {
  ibv_send_wr& request = next_request();
  std::copy_n(work.sge, work.sges, sges_[chain_].begin());
  request.sg_list = sges_[chain_].data();
  request.num_sge = work.sges;
  request.opcode = work.opcode;
  request.send_flags = 0;
  const absl::Span<const ibv_sge> sges(work.sge, static_cast<size_t>(work.sges));
  if (work.bytes > 0 && inlined(work, sges, work.bytes)) request.send_flags = IBV_SEND_INLINE;
  // A large one is worth a completion: what comes next need not wait for all of its chain.
  constexpr uint32_t kLarge = 256 << 10;
  if (work.bytes >= kLarge) request.send_flags |= IBV_SEND_SIGNALED;
  request.imm_data = htonl(work.immediate);
  request.wr.rdma.remote_addr = work.remote;
  request.wr.rdma.rkey = work.rkey;
  add_record(request, {work.tag, work.bytes, false});
}

void QueuePair::post_alone(const Alone& work) {
  alone_sge_ = work.local;
  alone_.wr_id = next_;
  alone_.opcode = work.opcode;
  alone_.send_flags = IBV_SEND_SIGNALED;
  if (inlined(work, {&work.local, 1}, work.local.length)) alone_.send_flags |= IBV_SEND_INLINE;
  alone_.imm_data = htonl(work.immediate);
  alone_.wr.rdma.remote_addr = work.remote;
  alone_.wr.rdma.rkey = work.rkey;
  ibv_send_wr* bad = nullptr;
  const int error = ibv_post_send(queue_pair_, &alone_, &bad);
  record(next_++) = {work.tag, work.local.length, false};
  inflight_bytes_ += work.local.length;
  if (error != 0) return break_off();
  handed_ = next_;
}

void QueuePair::add_message(std::string_view bytes, uint32_t tag) {
  ibv_send_wr& request = next_request();
  std::byte* at = slot(next_slot_);
  next_slot_ = (next_slot_ + 1) % kMessageSlots;
  ++slots_used_;
  std::memcpy(at, bytes.data(), bytes.size());
  sges_[chain_][0] = {.addr = reinterpret_cast<uintptr_t>(at),
                      .length = static_cast<uint32_t>(bytes.size()),
                      .lkey = registration_->lkey};
  request.sg_list = sges_[chain_].data();
  request.num_sge = 1;
  request.opcode = IBV_WR_SEND;
  request.send_flags = 0;
  if (bytes.size() <= max_inline_) request.send_flags = IBV_SEND_INLINE;
  add_record(request, {tag, static_cast<uint32_t>(bytes.size()), true});
}

void QueuePair::ring() {
  if (chain_ == 0) return;
  const size_t count = std::exchange(chain_, 0);
  if (broken_) return;
  requests_[count - 1].send_flags |= IBV_SEND_SIGNALED;
  ibv_send_wr* bad = nullptr;
  if (ibv_post_send(queue_pair_, requests_.data(), &bad) == 0) {
    handed_ = next_;
    return;
  }
  handed_ = next_ - count + static_cast<size_t>(bad - requests_.data());
  break_off();
}

void QueuePair::complete(QueuePairOwner& owner, ibv_wc_status status) {
  const Record done = record(first_++);
  inflight_bytes_ -= done.bytes;
  if (done.message) --slots_used_;
  owner.sent(done.tag, status);
}

void QueuePair::on_sent(QueuePairOwner& owner, const ibv_wc& completion) {
  if (completion.wr_id < first_ || completion.wr_id >= next_) return;  // not ours: ignored
  // In order: what came before it has succeeded, or would have been reported itself.
  const ibv_wc_status before = unseen_ ? IBV_WC_WR_FLUSH_ERR : IBV_WC_SUCCESS;
  while (first_ < completion.wr_id && completions_ != nullptr) complete(owner, before);
  if (completions_ == nullptr) return;
  if (completion.status != IBV_WC_SUCCESS) broken_ = true;
  complete(owner, completion.status);
}

// Before a caller hears of these.
void QueuePair::show_devices(QueuePairOwner& owner, absl::Span<ibv_wc> completions) {
  const absl::Status seen = unseen_ ? absl::OkStatus() : port_.device->show_devices();
  if (seen.ok() && !unseen_) return;
  for (ibv_wc& each : completions) each.status = IBV_WC_WR_FLUSH_ERR;
  if (!std::exchange(unseen_, true)) owner.unseen(seen);
}

bool QueuePair::poll(QueuePairOwner& owner) {
  constexpr int kBatch = 16;
  constexpr int kRounds = 4;
  bool any = false;
  // The owner may destroy the queue pair from within a call.
  for (int round = 0; round < kRounds && completions_ != nullptr; ++round) {
    ibv_wc batch[kBatch];
    const int count = ibv_poll_cq(completions_, kBatch, batch);
    if (count <= 0) {
      if (count < 0) broken_ = true;
      break;
    }
    any = true;
    show_devices(owner, {batch, static_cast<size_t>(count)});
    uint32_t again[kBatch];
    size_t free = 0;
    for (int i = 0; i < count && completions_ != nullptr; ++i) {
      const ibv_wc& completion = batch[i];
      if ((completion.wr_id & kReceiveId) == 0) {
        on_sent(owner, completion);
        continue;
      }
      if (pool_ == nullptr) --posted_receives_;
      const bool good = completion.status == IBV_WC_SUCCESS;
      if (good && !closed_) receive(owner, completion);
      if (!good) broken_ = true;
      // Its own receives flush with it; those of the pool serve others.
      if (good || pool_ != nullptr) {
        again[free++] = static_cast<uint32_t>(completion.wr_id & ~kReceiveId);
      }
    }
    if (free > 0) post_receives(again, free);
    if (count < kBatch) break;
  }
  // Shared receives do not flush: an event says that the last one was used. What the adapter may
  // still have been writing when it was told to stop has not arrived, by this end's word to the
  // peer.
  if (erred_ && !any && idle() && (last_receive_ || ++quiet_polls_ > kQuietPolls)) closed_ = true;
  // Work that was added after the break was never handed to the adapter.
  if (completions_ != nullptr && broken_ && first_ >= handed_ && first_ < next_) {
    chain_ = 0;
    while (first_ < next_) complete(owner, IBV_WC_WR_FLUSH_ERR);
  }
  return any;
}

void QueuePair::receive(QueuePairOwner& owner, const ibv_wc& completion) {
  if (received_ == granted_) {
    // Shared receives are others' too.
    break_off();
    return owner.overrun();
  }
  ++received_;
  if (completion.opcode == IBV_WC_RECV_RDMA_WITH_IMM)
    return owner.counted(ntohl(completion.imm_data));
  const auto index = static_cast<uint32_t>(completion.wr_id & ~kReceiveId);
  owner.received({reinterpret_cast<const char*>(received_at(index)), completion.byte_len});
}

uint32_t QueuePair::give_back(uint32_t owed) {
  if (pool_ != nullptr && pool_->scarce() && window_ > ReceivePool::kLeast) {
    const uint32_t less = std::min(owed, (window_ - ReceivePool::kLeast + 1) / 2);
    pool_->take_back(less);
    window_ -= less;
    owed -= less;
  } else if (pool_ != nullptr && window_ < tuning_.receive_depth && owed >= window_ / 4) {
    const uint32_t more = pool_->grant(std::min(window_, tuning_.receive_depth - window_));
    window_ += more;
    owed += more;
  }
  granted_ += owed;
  return owed;
}

bool QueuePair::arm() {
  if (completions_ == nullptr || *armed_) return true;
  *armed_ = ibv_req_notify_cq(completions_, 0) == 0;
  return false;
}

}  // namespace baton::verbs
