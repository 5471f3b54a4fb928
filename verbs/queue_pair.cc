// The life of a queue pair: created, connected to the peer's, put into error, destroyed.
#include "verbs/queue_pair.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "absl/strings/str_format.h"
#include "transport/base/worker_keys.h"

namespace baton::verbs {
namespace {

constexpr int kMostReads = 128;  // that this end answers at a time; how many are asked is a setting

const ibv_gid_entry* find_gid(const Port& port, uint32_t index) {
  const auto it = std::find_if(port.gids.begin(), port.gids.end(),
                               [&](const auto& entry) { return entry.gid_index == index; });
  return it == port.gids.end() ? nullptr : &*it;
}

uint8_t mtu_code(uint32_t bytes) {
  uint8_t code = IBV_MTU_256;
  while (code < IBV_MTU_4096 && (256u << code) <= bytes) ++code;
  return code;
}

}  // namespace

QueuePair::QueuePair(const Port& port, const GidChoice& gid, const Tuning& tuning)
    : port_(port),
      api_(port.device->api()),
      gid_(gid),
      tuning_(tuning),
      pool_(port.device->receive_pool()) {
  alone_.sg_list = &alone_sge_;
  alone_.num_sge = 1;
}

absl::StatusOr<std::unique_ptr<QueuePair>> QueuePair::create(const Port& port, const GidChoice& gid,
                                                             const Tuning& tuning) {
  std::unique_ptr<QueuePair> made(new QueuePair(port, gid, tuning));
  if (absl::Status status = made->make(); !status.ok()) return status;
  return made;
}

absl::Status QueuePair::make() {
  const ibv_device_attr& device = port_.device->attributes();
  const auto limited = [](uint32_t wish, int limit) {
    return limit > 0 ? std::min(wish, static_cast<uint32_t>(limit)) : wish;
  };
  depth_ = limited(tuning_.send_depth, device.max_qp_wr);
  const uint32_t most = limited(tuning_.receive_depth, device.max_qp_wr);
  if (pool_ != nullptr) {
    window_ = pool_->grant(std::min(most, pool_->share()));
    if (window_ < std::min(most, ReceivePool::kLeast)) {  // too little is left there
      pool_->take_back(window_);
      pool_ = nullptr;
    }
  }
  if (pool_ == nullptr) receives_ = window_ = most;
  granted_ = window_;
  max_sges_ = static_cast<int>(limited(kMaxSges, device.max_sge));
  max_read_sges_ = static_cast<int>(limited(static_cast<uint32_t>(max_sges_), device.max_sge_rd));
  mtu_ = std::min(mtu_code(tuning_.mtu), static_cast<uint8_t>(port_.attributes.active_mtu));

  const size_t bytes = (receives_ + kMessageSlots) * kMessageBytes;
  memory_ = static_cast<std::byte*>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096));
  if (memory_ == nullptr) return absl::ResourceExhaustedError("no memory for message buffers");
  auto registration = port_.device->register_own(memory_, bytes);
  if (!registration.ok()) return registration.status();
  registration_ = *registration;

  completions_ = api_.ibv_create_cq(port_.device->context(), static_cast<int>(depth_ + most),
                                    armed_.get(), port_.device->channel(), 0);
  if (completions_ == nullptr) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "%s: no completion queue of %u entries (%s); lower verbs.send_depth, or close some of the "
        "connections of this device",
        port_.name(), depth_ + most, strerror(errno)));
  }
  for (max_inline_ = tuning_.inline_bytes; queue_pair_ == nullptr; max_inline_ /= 2) {
    ibv_qp_init_attr attributes{};
    attributes.send_cq = completions_;
    attributes.recv_cq = completions_;
    attributes.srq = pool_ != nullptr ? pool_->handle() : nullptr;
    attributes.cap = {.max_send_wr = depth_,
                      .max_recv_wr = receives_,
                      .max_send_sge = static_cast<uint32_t>(max_sges_),
                      .max_recv_sge = pool_ != nullptr ? 0u : 1u,
                      .max_inline_data = max_inline_};
    attributes.qp_type = IBV_QPT_RC;
    queue_pair_ = api_.ibv_create_qp(port_.device->pd(), &attributes);
    if (queue_pair_ != nullptr) {
      max_inline_ = attributes.cap.max_inline_data;
      break;
    }
    if (max_inline_ == 0) {
      return absl::ResourceExhaustedError(absl::StrFormat(
          "%s: no queue pair of depth %u (%s; the device has %d in all); lower verbs.send_depth or "
          "verbs.qps (-q), or close some of the connections of this device",
          port_.name(), depth_, strerror(errno), device.max_qp));
    }
  }
  number_ = queue_pair_->qp_num;
  base::fill_with_secret(&sequence_, sizeof sequence_);
  sequence_ &= 0xffffff;
  records_.resize(std::bit_ceil(depth_));

  ibv_qp_attr init{};
  init.qp_state = IBV_QPS_INIT;
  init.port_num = port_.number;
  init.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
  absl::Status status =
      modify(init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, "INIT");
  if (!status.ok()) return status;
  // Before the peer knows of this end: no message can ever find the queue empty.
  std::vector<uint32_t> slots(receives_);
  for (uint32_t i = 0; i < receives_; ++i) slots[i] = i;
  post_receives(slots.data(), slots.size());
  return broken_ ? absl::InternalError(port_.name() + ": receives cannot be posted")
                 : absl::OkStatus();
}

QueuePair::~QueuePair() {
  destroy();
  if (registration_ != nullptr) api_.ibv_dereg_mr(registration_);
  std::free(memory_);
}

// Takes what completes, for a while. What this queue pair has taken from the pool goes back there.
// True once the adapter has reported all that was posted.
bool QueuePair::flush(QueuePairOwner* heir) {
  constexpr int kPolls = 20'000;  // a fraction of a millisecond, where nothing comes
  uint64_t sent = first_;
  uint32_t receives = posted_receives_;
  // No thread can hear the event here.
  uint32_t quiet = closed_ || last_receive_ ? kQuietPolls : 0;
  for (int poll = 0; poll < kPolls; ++poll) {
    ibv_wc completion;
    const int count = ibv_poll_cq(completions_, 1, &completion);
    if (count < 0) return false;
    if (count == 0) {
      if (sent >= handed_ && (pool_ != nullptr ? ++quiet > kQuietPolls : receives == 0))
        return true;
      continue;
    }
    const bool is_send = (completion.wr_id & kReceiveId) == 0;
    const bool good = completion.status == IBV_WC_SUCCESS && !closed_ && !unseen_;
    if (!is_send && heir != nullptr && good && port_.device->show_devices().ok()) {
      receive(*heir, completion);
    }
    if (is_send) {
      sent = std::max(sent, completion.wr_id + 1);
    } else if (pool_ != nullptr) {
      const auto index = static_cast<uint32_t>(completion.wr_id & ~kReceiveId);
      pool_->post(&index, 1);
    } else {
      --receives;
    }
  }
  return false;
}

void QueuePair::destroy(QueuePairOwner* heir) {
  const bool troubled = std::exchange(broken_, true);
  bool flushed = false;
  if (queue_pair_ != nullptr && completions_ != nullptr) {
    if (!erred_) break_off();
    flushed = flush(heir);
  }
  if (pool_ != nullptr) pool_->take_back(std::exchange(window_, 0));
  ibv_qp* const queue_pair = std::exchange(queue_pair_, nullptr);
  ibv_cq* const completions = std::exchange(completions_, nullptr);
  if (!flushed || !troubled) {
    if (queue_pair != nullptr) api_.ibv_destroy_qp(queue_pair);
    if (completions != nullptr) api_.ibv_destroy_cq(completions);
    return;
  }
  // With all that the adapter may still look at.
  port_.device->reaper().reap(
      [&api = api_, queue_pair, completions, registration = std::exchange(registration_, nullptr),
       memory = std::exchange(memory_, nullptr), armed = std::shared_ptr<bool>(std::move(armed_))] {
        api.ibv_destroy_qp(queue_pair);
        api.ibv_destroy_cq(completions);
        if (registration != nullptr) api.ibv_dereg_mr(registration);
        std::free(memory);
      });
}

void QueuePair::break_off() {
  broken_ = erred_ = true;
  if (queue_pair_ == nullptr) return;
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_ERR;
  // If this fails too, the queue pair does not drain and is destroyed after a while.
  (void)api_.ibv_modify_qp(queue_pair_, &attributes, IBV_QP_STATE);
}

absl::Status QueuePair::modify(ibv_qp_attr& attributes, int mask, const char* to) const {
  const int error = api_.ibv_modify_qp(queue_pair_, &attributes, mask);
  if (error == 0) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrFormat("%s: the queue pair cannot be brought to %s (%s); with %s", port_.name(), to,
                      strerror(error), gid_.reason));
}

Endpoint QueuePair::local() const {
  Endpoint end;
  end.origin = port_.index;
  end.mtu = mtu_;
  end.family = static_cast<uint8_t>(gid_.family);
  end.rd_atomic =
      static_cast<uint8_t>(std::clamp(port_.device->attributes().max_qp_rd_atom, 1, kMostReads));
  end.lid = port_.attributes.lid;
  end.receives = static_cast<uint16_t>(window_);
  end.queue_pair = number_;
  end.sequence = sequence_;
  end.gid = gid_.gid;
  end.traffic_class = tuning_.traffic_class;
  end.service_level = tuning_.service_level;
  return end;
}

bool QueuePair::address_stands() const {
  if (port_.infiniband() && port_.attributes.lid != lid_) return false;
  if (!source_) return true;
  const ibv_gid_entry* now = find_gid(port_, source_->gid_index);
  return now != nullptr && now->gid_type == source_->gid_type &&
         std::equal(now->gid.raw, now->gid.raw + sizeof now->gid.raw, source_->gid.raw);
}

std::string QueuePair::ends() const {
  const auto end = [](unsigned lid, uint32_t number, uint32_t sequence, const ibv_gid& gid) {
    return absl::StrFormat("LID %#04x QPN %#06x PSN %#06x GID %s", lid, number, sequence,
                           gid_text(gid));
  };
  return absl::StrFormat("local %s, remote %s",
                         end(lid_, number_, sequence_, source_ ? source_->gid : gid_.gid),
                         end(peer_.lid, peer_.queue_pair, peer_.sequence, peer_.gid));
}

uint8_t QueuePair::reads_asked(const Endpoint& peer) const {
  const int own = std::max(1, port_.device->attributes().max_qp_init_rd_atom);
  return static_cast<uint8_t>(std::min({own, int{peer.rd_atomic}, int{tuning_.rd_atomic}}));
}

absl::Status QueuePair::connect(const Endpoint& peer) {
  mtu_ = std::min(mtu_, peer.mtu);
  ibv_qp_attr ready{};
  ready.qp_state = IBV_QPS_RTR;
  ready.path_mtu = static_cast<ibv_mtu>(mtu_);
  ready.dest_qp_num = peer.queue_pair;
  ready.rq_psn = peer.sequence;
  ready.max_dest_rd_atomic = local().rd_atomic;
  ready.min_rnr_timer = 12;
  ready.ah_attr.port_num = port_.number;
  const auto either = [](uint8_t own, uint8_t theirs) { return own != 0 ? own : theirs; };
  const uint8_t level = either(tuning_.service_level, peer.service_level);
  const uint8_t traffic = either(tuning_.traffic_class, peer.traffic_class);
  if (level != 0) ready.ah_attr.sl = level;
  ready.ah_attr.dlid = peer.lid;
  if (gid_.family != Family::kNone) {
    ready.ah_attr.is_global = 1;
    ready.ah_attr.grh.dgid = peer.gid;
    ready.ah_attr.grh.sgid_index = static_cast<uint8_t>(gid_.index);
    ready.ah_attr.grh.hop_limit = 64;
    ready.ah_attr.grh.traffic_class = traffic;
  }
  peer_ = peer;
  lid_ = port_.attributes.lid;
  const uint32_t index = ready.ah_attr.grh.sgid_index;
  const ibv_gid_entry* source = ready.ah_attr.is_global ? find_gid(port_, index) : nullptr;
  if (source != nullptr) source_ = *source;
  absl::Status status = modify(ready,
                               IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                                   IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
                               "RTR");
  if (!status.ok()) return status;
  ibv_qp_attr send{};
  send.qp_state = IBV_QPS_RTS;
  send.sq_psn = sequence_;
  send.timeout = tuning_.timeout;
  send.retry_cnt = tuning_.retry_count;
  send.rnr_retry = tuning_.rnr_retry;
  send.max_rd_atomic = reads_asked(peer);
  return modify(send,
                IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
                    IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC,
                "RTS");
}

}  // namespace baton::verbs
