// The receives of a device: slabs of buffers, and how many each queue pair may use.
#include "verbs/device/receive_pool.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "absl/strings/str_format.h"
#include "verbs/device/device.h"
#include "verbs/device/message.h"

namespace baton::verbs {

absl::StatusOr<std::unique_ptr<ReceivePool>> ReceivePool::create(const Device& device,
                                                                 const Tuning& tuning) {
  std::unique_ptr<ReceivePool> pool(new ReceivePool(device));
  const auto most = static_cast<uint32_t>(std::max(0, device.attributes().max_srq_wr));
  pool->limit_ = std::max(kSlab, std::min(tuning.shared_receives, most) / kSlab * kSlab);
  ibv_srq_init_attr wish{};
  wish.attr.max_wr = pool->limit_;
  wish.attr.max_sge = 1;
  pool->queue_ = device.api().ibv_create_srq(device.pd(), &wish);
  if (pool->queue_ == nullptr) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "%s: no shared receive queue of %u entries (%s); lower verbs.shared_receives, or set it to "
        "0 so that every queue pair has receives of its own",
        device.name(), pool->limit_, strerror(errno)));
  }
  return pool;
}

ReceivePool::~ReceivePool() {
  if (queue_ != nullptr) device_.api().ibv_destroy_srq(queue_);
  for (const Slab& slab : slabs_) {
    device_.api().ibv_dereg_mr(slab.registration);
    std::free(slab.memory);
  }
}

std::byte* ReceivePool::slot(uint32_t index) const {
  return slabs_[index / kSlab].memory + size_t{index % kSlab} * kMessageBytes;
}

uint32_t ReceivePool::grant(uint32_t wish) {
  wish = std::min(wish, limit_ - granted_);
  while (granted_ + wish > capacity() && grow()) {
  }
  wish = std::min(wish, capacity() - granted_);
  granted_ += wish;
  return wish;
}

bool ReceivePool::grow() {
  Slab slab;
  slab.memory = static_cast<std::byte*>(std::aligned_alloc(4096, kSlab * kMessageBytes));
  if (slab.memory == nullptr) return false;
  auto registered = device_.register_own(slab.memory, kSlab * kMessageBytes);
  if (!registered.ok()) {
    std::free(slab.memory);
    return false;
  }
  slab.registration = *registered;
  std::array<uint32_t, kSlab> fresh;
  std::iota(fresh.begin(), fresh.end(), capacity());
  slabs_.push_back(slab);
  post(fresh.data(), fresh.size());
  return true;
}

void ReceivePool::post(const uint32_t* slots, size_t count) {
  constexpr size_t kChain = 16;
  std::array<ibv_recv_wr, kChain> requests;
  std::array<ibv_sge, kChain> sges;
  while (count > 0) {
    const size_t n = std::min(count, kChain);
    for (size_t i = 0; i < n; ++i) {
      sges[i] = {.addr = reinterpret_cast<uintptr_t>(slot(slots[i])),
                 .length = kMessageBytes,
                 .lkey = slabs_[slots[i] / kSlab].registration->lkey};
      requests[i] = {.wr_id = kReceiveId | slots[i],
                     .next = i + 1 < n ? &requests[i + 1] : nullptr,
                     .sg_list = &sges[i],
                     .num_sge = 1};
    }
    ibv_recv_wr* bad = nullptr;
    // The queue has a place for every slot: it refuses only when the device is gone, and then no
    // completion comes either.
    if (ibv_post_srq_recv(queue_, requests.data(), &bad) != 0) return;
    slots += n;
    count -= n;
  }
}

}  // namespace baton::verbs
