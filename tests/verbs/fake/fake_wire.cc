// The fake's data path: posting, moving bytes, completing, failing.
#include <arpa/inet.h>

#include "absl/strings/str_cat.h"
#include "tests/std.h"
#include "tests/verbs/fake/fake_objects.h"
#include "transport/base/copies/fault_guard.h"

namespace baton {
namespace {

bool atomic(ibv_wr_opcode opcode) {
  return opcode == IBV_WR_ATOMIC_FETCH_AND_ADD || opcode == IBV_WR_ATOMIC_CMP_AND_SWP;
}

bool same(const ibv_gid& a, const ibv_gid& b) { return std::memcmp(a.raw, b.raw, 16) == 0; }

void notify(int fd) {
  const uint64_t one = 1;
  [[maybe_unused]] ssize_t put = write(fd, &one, sizeof one);
}

}  // namespace

int FakeVerbs::post(FakeQp& qp, const ibv_send_wr& request) {
  const ibv_qp_cap& limits = qp.limits.cap;
  const auto wrong = [&](auto... what) {
    violation(absl::StrCat(what...));
    return EINVAL;
  };
  if (qp.qp.state != IBV_QPS_RTS && qp.qp.state != IBV_QPS_ERR) {
    return wrong("a send posted in state ", qp.qp.state);
  }
  if (qp.used >= limits.max_send_wr) {
    violation(qp.unsignalled >= limits.max_send_wr
                  ? std::string("the send queue is full of unsignalled work: nothing will complete")
                  : absl::StrCat("the send queue of ", limits.max_send_wr, " overflows"));
    return ENOMEM;
  }
  if (request.num_sge < 0 || static_cast<uint32_t>(request.num_sge) > limits.max_send_sge) {
    return wrong(request.num_sge, " pieces in one request, the limit is ", limits.max_send_sge);
  }
  if (request.opcode == IBV_WR_RDMA_READ && request.num_sge > options_.max_sge_rd) {
    return wrong(request.num_sge, " pieces in one read, the limit is ", options_.max_sge_rd);
  }
  uint64_t bytes = 0;
  for (int i = 0; i < request.num_sge; ++i) bytes += request.sg_list[i].length;
  if (bytes > options_.max_message) {
    return wrong("a message of ", bytes, " bytes, the limit is ", options_.max_message);
  }
  const bool inlined = (request.send_flags & IBV_SEND_INLINE) != 0;
  if (inlined && (bytes > limits.max_inline_data || request.opcode == IBV_WR_RDMA_READ)) {
    return wrong(bytes, " bytes inline, the limit is ", limits.max_inline_data);
  }
  if (atomic(request.opcode) && (request.wr.atomic.remote_addr % 8 != 0 || bytes != 8)) {
    return wrong("an atomic that is not 8 bytes at a multiple of 8");
  }
  if (qp.sends.empty()) qp.waiting = false;
  qp.sends.push_back({});
  FakeWork& work = qp.sends[qp.sends.size() - 1];
  work.request = request;
  work.request.next = nullptr;
  std::copy_n(request.sg_list, request.num_sge, work.sge.begin());
  work.bytes = bytes;
  work.signalled = (request.send_flags & IBV_SEND_SIGNALED) != 0 || qp.limits.sq_sig_all != 0;
  if (inlined) {
    size_t at = 0;
    for (int i = 0; i < request.num_sge; ++i) {
      std::memcpy(&work.inlined[at], reinterpret_cast<const void*>(request.sg_list[i].addr),
                  request.sg_list[i].length);
      at += request.sg_list[i].length;
    }
    ++stats_.inlined;
  }
  ++qp.used;
  qp.unsignalled = work.signalled ? 0 : qp.unsignalled + 1;
  ++stats_.work;
  stats_.signalled += work.signalled;
  stats_.gathered += request.num_sge > 1;
  if (qp.qp.state == IBV_QPS_ERR) complete(qp, IBV_WC_WR_FLUSH_ERR);
  return 0;
}

void FakeVerbs::push(FakeCq& queue, const ibv_wc& completion, FakeQp* sender, uint32_t retires) {
  if (queue.entries.size() >= static_cast<size_t>(queue.cq.cqe)) {
    violation(absl::StrCat("a completion queue of ", queue.cq.cqe, " overflows"));
    return;
  }
  queue.entries.push_back({completion, sender, retires});
  if (!std::exchange(queue.armed, false) || queue.cq.channel == nullptr) return;
  fake_of<FakeChannel>(queue.cq.channel).events.push_back(&queue.cq);
  notify(queue.cq.channel->fd);
}

// The first work request is over.
void FakeVerbs::complete(FakeQp& qp, ibv_wc_status status) {
  const FakeWork& work = qp.sends.front();
  ++qp.finished;
  qp.done = 0;
  qp.waiting = false;
  stats_.flushed += status == IBV_WC_WR_FLUSH_ERR;
  if (work.signalled || status != IBV_WC_SUCCESS) {
    ibv_wc completion{};
    completion.wr_id = work.request.wr_id;
    completion.status = status;
    completion.qp_num = qp.qp.qp_num;
    if (status == IBV_WC_SUCCESS) {
      completion.opcode = work.request.opcode == IBV_WR_SEND        ? IBV_WC_SEND
                          : work.request.opcode == IBV_WR_RDMA_READ ? IBV_WC_RDMA_READ
                          : atomic(work.request.opcode)             ? IBV_WC_FETCH_ADD
                                                                    : IBV_WC_RDMA_WRITE;
      completion.byte_len = static_cast<uint32_t>(work.bytes);
    } else {
      // As on a real adapter: with an error, nothing else is valid.
      completion.opcode = static_cast<ibv_wc_opcode>(0x5a);
      completion.byte_len = 0xdeadbeef;
    }
    push(qp.send_queue(), completion, &qp, std::exchange(qp.finished, 0));
  }
  qp.sends.pop_front();
  if (status != IBV_WC_SUCCESS && status != IBV_WC_WR_FLUSH_ERR) to_error(qp);
}

void FakeVerbs::to_error(FakeQp& qp) {
  leave_on_the_way(qp);
  qp.qp.state = IBV_QPS_ERR;
  const FakeDevice& device = devices_[qp.context->device];
  if (device.dead || device.hanging) return;  // not even that
  while (!qp.sends.empty()) complete(qp, IBV_WC_WR_FLUSH_ERR);
  // Shared receives stay for the others; an event says that this one takes no more of them.
  if (qp.qp.srq != nullptr) {
    if (slow_to_stop_ > 0 && !qp.receive_ring().empty()) {
      qp.held = qp.receive_ring().front();
      qp.held_polls = slow_to_stop_;
      qp.receive_ring().pop_front();
    } else {
      report(qp, IBV_EVENT_QP_LAST_WQE_REACHED);
    }
  }
  while (!qp.receives.empty()) {
    flush(qp, qp.receives.front());
    qp.receives.pop_front();
  }
}

// A receive that nothing comes into any more.
void FakeVerbs::flush(FakeQp& qp, const FakeReceive& receive) {
  ibv_wc completion{};
  completion.wr_id = receive.id;
  completion.status = IBV_WC_WR_FLUSH_ERR;
  completion.opcode = static_cast<ibv_wc_opcode>(0x5a);
  completion.qp_num = qp.qp.qp_num;
  ++stats_.flushed;
  push(qp.receive_queue(), completion, nullptr, 0);
}

void FakeVerbs::let_go(FakeCq& queue) {
  for (FakeQp* qp : running_) {
    if (!qp->held || &qp->receive_queue() != &queue || --qp->held_polls > 0) continue;
    flush(*qp, *qp->held);
    qp->held.reset();
    report(*qp, IBV_EVENT_QP_LAST_WQE_REACHED);
  }
}

void FakeVerbs::run(size_t bytes) {
  arrive();
  size_t idle = 0;
  while (bytes > 0 && idle < running_.size()) {
    if (turn_ >= running_.size()) turn_ = 0;
    idle = advance(*running_[turn_++], bytes) ? 0 : idle + 1;
  }
}

// Waits for something that may never come; false. After `limit` the work fails; true.
bool FakeVerbs::wait(FakeQp& qp, Time limit, ibv_wc_status status) {
  if (!std::exchange(qp.waiting, true)) qp.waiting_since = now();
  if (now() - qp.waiting_since < limit) return false;
  complete(qp, status);
  return true;
}

bool FakeVerbs::reachable(FakeQp& qp, FakeQp*& peer) {
  const FakeDevice& here = devices_[qp.context->device];
  peer = find_queue_pair(qp.attributes.dest_qp_num);
  if (peer == nullptr || !here.port_up || !here.cable) return false;
  const FakeDevice& there = devices_[peer->context->device];
  if (!there.port_up || !there.cable || there.dead) return false;
  if (peer->qp.state != IBV_QPS_RTR && peer->qp.state != IBV_QPS_RTS) return false;
  if (peer->attributes.dest_qp_num != qp.qp.qp_num) return false;
  const ibv_qp_attr& a = qp.attributes;
  const ibv_qp_attr& b = peer->attributes;
  const auto has = [](const FakeDevice& device, int index, const ibv_gid& gid) {
    return std::any_of(device.gids.begin(), device.gids.end(), [&](const ibv_gid_entry& entry) {
      return (index < 0 || entry.gid_index == static_cast<uint32_t>(index)) &&
             (index >= 0 || same(entry.gid, gid));
    });
  };
  // Packets go to the address that was given, from the one that the index names now.
  if (!has(here, a.ah_attr.grh.sgid_index, {}) || !has(there, -1, a.ah_attr.grh.dgid)) return false;
  if (a.path_mtu != b.path_mtu) violation("the ends of a connection differ in MTU");
  if (a.sq_psn != b.rq_psn) violation("the ends of a connection differ in packet numbers");
  if (a.max_rd_atomic > b.max_dest_rd_atomic) violation("more reads than the peer answers");
  return true;
}

ibv_wc_status FakeVerbs::check_local(const FakeQp& qp, bool written) const {
  const FakeWork& work = qp.sends.front();
  if (work.request.send_flags & IBV_SEND_INLINE) return IBV_WC_SUCCESS;
  for (int i = 0; i < work.request.num_sge; ++i) {
    const ibv_sge& sge = work.sge[static_cast<size_t>(i)];
    const FakeMr* region = find_region(sge.lkey);
    if (sge.length == 0) continue;
    const auto base = region == nullptr ? 0 : reinterpret_cast<uintptr_t>(region->mr.addr);
    if (region == nullptr || region->mr.pd != qp.qp.pd || sge.addr < base ||
        sge.addr + sge.length > base + region->mr.length ||
        (written && !(region->access & IBV_ACCESS_LOCAL_WRITE)) ||
        region->worth == FakeOptions::Worth::kRefused) {
      return IBV_WC_LOC_PROT_ERR;
    }
    // Looks pages up when it needs them, as an adapter with on-demand paging does.
    const auto* const data = reinterpret_cast<const std::byte*>(sge.addr);
    if (!written && region->mapped == nullptr && !base::readable(data, sge.length)) {
      return IBV_WC_LOC_PROT_ERR;
    }
  }
  return IBV_WC_SUCCESS;
}

bool FakeVerbs::check_remote(const FakeQp& qp, const FakeQp& peer, uint64_t bytes, unsigned right) {
  const auto& rdma = qp.sends.front().request.wr.rdma;
  const bool is_atomic = right == IBV_ACCESS_REMOTE_ATOMIC;
  const auto& word = qp.sends.front().request.wr.atomic;
  const uint64_t at = is_atomic ? word.remote_addr : rdma.remote_addr;
  const FakeMr* region = find_region(is_atomic ? word.rkey : rdma.rkey);
  if (region == nullptr || region->mr.pd != peer.qp.pd || !(region->access & right) ||
      !(peer.attributes.qp_access_flags & right)) {
    return false;
  }
  if (region->worth == FakeOptions::Worth::kRefused) return false;
  const auto base = reinterpret_cast<uintptr_t>(region->mr.addr);
  return at >= base && bytes <= region->mr.length && at - base <= region->mr.length - bytes;
}

// Where the adapter reaches an address of a region.
std::byte* FakeVerbs::reach(uint32_t key, uint64_t address, bool written) const {
  const FakeMr* region = find_region(key);
  if (region == nullptr || region->mapped == nullptr) return reinterpret_cast<std::byte*>(address);
  using Worth = FakeOptions::Worth;
  if (region->worth == Worth::kElsewhere || (written && region->worth == Worth::kWritesElsewhere)) {
    static std::array<std::byte, 8 << 20> elsewhere;
    return elsewhere.data();
  }
  return region->mapped + region->offset + (address - reinterpret_cast<uintptr_t>(region->mr.addr));
}

// Between `remote` and bytes [at, +bytes) of the local pieces of the first work request.
void FakeVerbs::copy(FakeQp& qp, std::byte* remote, size_t at, size_t bytes, bool to_local) {
  FakeWork& work = qp.sends.front();
  if (work.request.send_flags & IBV_SEND_INLINE) {
    put(remote, reinterpret_cast<const std::byte*>(&work.inlined[at]), bytes);
    return;
  }
  for (size_t i = 0; bytes > 0; ++i) {
    const ibv_sge& sge = work.sge[i];
    if (at >= sge.length) {
      at -= sge.length;
      continue;
    }
    const size_t step = std::min<size_t>(bytes, sge.length - at);
    std::byte* const local = reach(sge.lkey, sge.addr, to_local) + at;
    put(to_local ? local : remote, to_local ? remote : local, step);
    remote += step;
    bytes -= step;
    at = 0;
  }
}

// The peer's end answers with a negative acknowledgement and breaks.
void FakeVerbs::refuse(FakeQp& qp, FakeQp& peer, ibv_wc_status here) {
  report(peer, IBV_EVENT_QP_ACCESS_ERR);
  to_error(peer);
  complete(qp, here);
}

// Puts a message, or an immediate, into the peer's next receive.
bool FakeVerbs::deliver(FakeQp& qp, FakeQp& peer, bool immediate) {
  base::Ring<FakeReceive>& receives = peer.receive_ring();
  if (receives.empty()) {
    if (!qp.waiting) ++stats_.not_ready;
    if (qp.attributes.rnr_retry == 7) return wait(qp, kNever, IBV_WC_RNR_RETRY_EXC_ERR);
    return wait(qp, std::chrono::microseconds(640) * (qp.attributes.rnr_retry + 1),
                IBV_WC_RNR_RETRY_EXC_ERR);
  }
  const FakeWork& work = qp.sends.front();
  const FakeReceive receive = receives.front();
  if (!immediate && work.bytes > receive.sge.length) {
    refuse(qp, peer, IBV_WC_REM_INV_REQ_ERR);
    return true;
  }
  receives.pop_front();
  ibv_wc completion{};
  completion.wr_id = receive.id;
  completion.status = IBV_WC_SUCCESS;
  completion.opcode = immediate ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV;
  completion.byte_len = static_cast<uint32_t>(work.bytes);
  completion.qp_num = peer.qp.qp_num;
  if (immediate) {
    completion.imm_data = work.request.imm_data;
    completion.wc_flags = IBV_WC_WITH_IMM;
    ++stats_.immediates;
  } else {
    copy(qp, reinterpret_cast<std::byte*>(receive.sge.addr), 0, work.bytes, false);
  }
  push(peer.receive_queue(), completion, nullptr, 0);
  qp.sends.front().delivered = devices_[peer.context->device].mute;
  if (!qp.sends.front().delivered) complete(qp, IBV_WC_SUCCESS);
  return true;
}

// One packet of the first work request; false when nothing can be done.
bool FakeVerbs::advance(FakeQp& qp, size_t& budget) {
  if (qp.qp.state != IBV_QPS_RTS || qp.sends.empty()) return false;
  FakeDevice& device = devices_[qp.context->device];
  if (device.dead || device.hanging) return false;
  FakeWork& work = qp.sends.front();
  const bool read = work.request.opcode == IBV_WR_RDMA_READ;
  if (const ibv_wc_status local = check_local(qp, read || atomic(work.request.opcode));
      local != IBV_WC_SUCCESS) {
    complete(qp, local);
    return true;
  }
  FakeQp* peer = nullptr;
  if (!reachable(qp, peer) || (work.delivered && devices_[peer->context->device].mute)) {
    const Time once(int64_t{4096} << qp.attributes.timeout);
    return wait(qp, once * (qp.attributes.retry_cnt + 1), IBV_WC_RETRY_EXC_ERR);
  }
  if (work.delivered) {  // sent once more, and acknowledged
    complete(qp, IBV_WC_SUCCESS);
    return true;
  }
  if (work.request.opcode == IBV_WR_SEND) {
    budget -= std::min<size_t>(budget, work.bytes + 64);
    return deliver(qp, *peer, false);
  }
  unsigned right = read ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE;
  if (atomic(work.request.opcode)) right = IBV_ACCESS_REMOTE_ATOMIC;
  // A message of no bytes has no address to check.
  if (work.bytes > 0 && !check_remote(qp, *peer, work.bytes, right)) {
    refuse(qp, *peer, IBV_WC_REM_ACCESS_ERR);
    return true;
  }
  if (atomic(work.request.opcode)) {
    auto* word = reinterpret_cast<uint64_t*>(work.request.wr.atomic.remote_addr);
    const uint64_t before = *word;
    const auto& operands = work.request.wr.atomic;
    if (work.request.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) *word += operands.compare_add;
    if (work.request.opcode == IBV_WR_ATOMIC_CMP_AND_SWP && before == operands.compare_add) {
      *word = operands.swap;
    }
    *reinterpret_cast<uint64_t*>(work.sge[0].addr) = before;
    complete(qp, IBV_WC_SUCCESS);
    return true;
  }
  const size_t packet = std::min<uint64_t>(128u << qp.attributes.path_mtu, work.bytes - qp.done);
  const auto& rdma = work.request.wr.rdma;
  copy(qp, reach(rdma.rkey, rdma.remote_addr, !read) + qp.done, qp.done, packet, read);
  qp.done += packet;
  device.moved += packet;
  if (packet > 0) qp.waiting = false;
  budget -= std::min(budget, packet + 64);
  if (qp.done < work.bytes) return true;
  if (work.request.opcode == IBV_WR_RDMA_WRITE_WITH_IMM) return deliver(qp, *peer, true);
  complete(qp, IBV_WC_SUCCESS);
  return true;
}

}  // namespace baton
