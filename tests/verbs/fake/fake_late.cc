// What lands late in the fake: writes to dma-bufs, and packets that were on their way when the
// queue pair that had sent them ended.
#include <algorithm>
#include <cstring>

#include "tests/verbs/fake/fake_objects.h"

namespace baton {

bool FakeVerbs::lies_late(const std::byte* at) const {
  return options_.late_writes != 0 &&
         std::any_of(regions_.begin(), regions_.end(), [&](const FakeMr* region) {
           return region != nullptr && region->mapped != nullptr && at >= region->mapped &&
                  at < region->mapped + region->mapped_bytes;
         });
}

// A read pushes what was written before it ahead of itself, as on a bus.
void FakeVerbs::put(std::byte* to, const std::byte* from, size_t bytes) {
  if (lies_late(from)) land();
  if (!lies_late(to)) {
    std::memmove(to, from, bytes);
    return;
  }
  late_.push_back({to, {from, from + bytes}});
  if (late_random_() % 8 == 0) land();  // soon is late too
}

void FakeVerbs::land() {
  for (const Late& each : late_) std::memcpy(each.to, each.bytes.data(), each.bytes.size());
  late_.clear();
}

void FakeVerbs::set_late_writes(uint32_t seed) {
  const std::lock_guard lock(mutex_);
  options_.late_writes = seed;
  late_random_.seed(seed);
}

void FakeVerbs::land_writes() {
  const std::lock_guard lock(mutex_);
  land();
}

// Of the write that it was at. They have left, whatever becomes of the queue pair and its memory.
void FakeVerbs::leave_on_the_way(FakeQp& qp) {
  FakeQp* peer = nullptr;
  if (late_packets_ == 0 || qp.qp.state != IBV_QPS_RTS || qp.sends.empty()) return;
  const FakeWork& work = qp.sends.front();
  const bool write =
      work.request.opcode == IBV_WR_RDMA_WRITE || work.request.opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
  if (!write || qp.done == work.bytes || !reachable(qp, peer)) return;
  if (!check_remote(qp, *peer, work.bytes, IBV_ACCESS_REMOTE_WRITE)) return;
  constexpr uint64_t kMost = 64 << 10;
  const auto& rdma = work.request.wr.rdma;
  OnTheWay packets{.from = qp.qp.qp_num,
                   .to = peer->qp.qp_num,
                   .key = rdma.rkey,
                   .address = rdma.remote_addr + qp.done,
                   .polls = late_packets_,
                   .bytes = {}};
  packets.bytes.resize(std::min<uint64_t>(kMost, work.bytes - qp.done));
  copy(qp, packets.bytes.data(), qp.done, packets.bytes.size(), false);
  on_the_way_.push_back(std::move(packets));
}

// The adapter there looks at its own queue pair only: it does not know that the other end is gone.
void FakeVerbs::arrive() {
  std::erase_if(on_the_way_, [&](OnTheWay& packets) {
    if (--packets.polls > 0) return false;
    const FakeQp* peer = find_queue_pair(packets.to);
    const bool connected = peer != nullptr && peer->attributes.dest_qp_num == packets.from &&
                           (peer->qp.state == IBV_QPS_RTR || peer->qp.state == IBV_QPS_RTS);
    const FakeMr* region = connected ? find_region(packets.key) : nullptr;
    if (region == nullptr) return true;
    put(reach(packets.key, packets.address), packets.bytes.data(), packets.bytes.size());
    ++stats_.landed_late;
    return true;
  });
}

}  // namespace baton
