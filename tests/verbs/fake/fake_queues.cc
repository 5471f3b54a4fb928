// The fake's queue pairs, the states they go through, and shared receive queues.
#include <algorithm>
#include <cerrno>

#include "absl/strings/str_cat.h"
#include "tests/verbs/fake/fake_objects.h"

namespace baton {

struct FakeQueueCalls : FakeCall {
  static ibv_srq* create_srq(ibv_pd* pd, ibv_srq_init_attr* wish) {
    const Locked fake(pd->context);
    if (wish->attr.max_wr < 1 || static_cast<int>(wish->attr.max_wr) > fake->options_.max_shared ||
        wish->attr.max_sge != 1) {
      return failed(EINVAL);
    }
    auto* made = new FakeSrq;
    made->srq.context = pd->context;
    made->srq.pd = pd;
    made->most = wish->attr.max_wr;
    ++fake_of<FakePd>(pd).users;
    ++fake->objects_;
    fake->shared_.push_back(made);
    return &made->srq;
  }
  static int destroy_srq(ibv_srq* handle) {
    const Locked fake(handle->context);
    auto& queue = fake_of<FakeSrq>(handle);
    if (queue.users != 0)
      fake->violation("a shared receive queue freed while a queue pair uses it");
    std::erase(fake->shared_, &queue);
    --fake_of<FakePd>(handle->pd).users;
    --fake->objects_;
    delete &queue;
    return 0;
  }
  static int post_srq_recv(ibv_srq* handle, ibv_recv_wr* request, ibv_recv_wr** bad) {
    const Locked fake(handle->context);
    auto& queue = fake_of<FakeSrq>(handle);
    if (queue.broken) {
      *bad = request;
      return EIO;
    }
    for (; request != nullptr; request = request->next) {
      if (request->num_sge != 1 || queue.receives.size() >= queue.most) {
        fake->violation("the shared receive queue overflows");
        *bad = request;
        return ENOMEM;
      }
      queue.receives.push_back({request->wr_id, request->sg_list[0]});
    }
    return 0;
  }
  static ibv_qp* create_qp(ibv_pd* pd, ibv_qp_init_attr* wish) {
    const Locked fake(pd->context);
    const FakeOptions& options = fake->options_;
    const ibv_qp_cap& cap = wish->cap;
    if (fake->running_.size() >= options.max_queue_pairs) return failed(ENOMEM);
    if (wish->qp_type != IBV_QPT_RC || static_cast<int>(cap.max_send_wr) > options.max_work ||
        static_cast<int>(cap.max_recv_wr) > options.max_work ||
        static_cast<int>(cap.max_send_sge) > options.max_sge ||
        cap.max_send_sge > FakeWork::kMaxSge || cap.max_inline_data > options.max_inline) {
      return failed(EINVAL);
    }
    auto* made = new FakeQp;
    made->context = &fake_of_context(pd->context);
    made->limits = *wish;
    ibv_qp& qp = made->qp;
    qp.context = pd->context;
    qp.pd = pd;
    qp.send_cq = wish->send_cq;
    qp.recv_cq = wish->recv_cq;
    qp.srq = wish->srq;
    if (qp.srq != nullptr) ++fake_of<FakeSrq>(qp.srq).users;
    qp.qp_num = static_cast<uint32_t>(fake->queue_pairs_.size());
    qp.state = IBV_QPS_RESET;
    qp.qp_type = wish->qp_type;
    fake->queue_pairs_.push_back(made);
    fake->running_.push_back(made);
    ++made->send_queue().users;
    ++fake_of<FakePd>(pd).users;
    ++fake->objects_;
    ++fake->stats_.queue_pairs;
    return &qp;
  }
  static int destroy_qp(ibv_qp* handle) {
    const Locked fake(handle->context);
    auto& qp = fake_of<FakeQp>(handle);
    // Its completions go with it.
    for (FakeCq* queue : {&qp.send_queue(), &qp.receive_queue()}) {
      queue->entries.remove_if(
          [&](const FakeCq::Entry& entry) { return entry.completion.qp_num == handle->qp_num; });
    }
    fake->queue_pairs_[handle->qp_num] = nullptr;
    std::erase(fake->running_, &qp);
    if (handle->srq != nullptr) --fake_of<FakeSrq>(handle->srq).users;
    --qp.send_queue().users;
    --fake_of<FakePd>(handle->pd).users;
    --fake->objects_;
    delete &qp;
    return 0;
  }
  static int modify_qp(ibv_qp* handle, ibv_qp_attr* wish, int mask) {
    const Locked fake(handle->context);
    auto& qp = fake_of<FakeQp>(handle);
    ibv_qp_attr& now = qp.attributes;
    const auto wrong = [&](const char* what) {
      fake->violation(absl::StrCat("modifying a queue pair in state ", handle->state, " to ",
                                   wish->qp_state, ": ", what));
      return EINVAL;
    };
    if (!(mask & IBV_QP_STATE)) return wrong("no state given");
    int needs = IBV_QP_STATE;
    switch (wish->qp_state) {
      case IBV_QPS_ERR:
        if (handle->state != IBV_QPS_ERR) fake->to_error(qp);
        return 0;
      case IBV_QPS_RESET:
        if (qp.used != 0 || !qp.receives.empty()) {
          return wrong("work is outstanding, and would vanish: drain it through ERR");
        }
        handle->state = IBV_QPS_RESET;
        return 0;
      case IBV_QPS_INIT:
        needs |= IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
        if (handle->state != IBV_QPS_RESET || mask != needs || wish->port_num != 1) {
          return wrong("wrong order or attributes");
        }
        now.qp_access_flags = wish->qp_access_flags;
        break;
      case IBV_QPS_RTR: {
        needs |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                 IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
        if (handle->state != IBV_QPS_INIT || mask != needs || !wish->ah_attr.is_global) {
          return wrong("wrong order or attributes");
        }
        if (wish->path_mtu > fake->options_.mtu ||
            wish->max_dest_rd_atomic > fake->options_.max_reads) {
          return wrong("beyond the device's limits");
        }
        const auto& gids = fake->devices_[qp.context->device].gids;
        const bool exists = std::any_of(gids.begin(), gids.end(), [&](const auto& entry) {
          return entry.gid_index == wish->ah_attr.grh.sgid_index;
        });
        if (!exists) return EINVAL;
        now.ah_attr = wish->ah_attr;
        now.path_mtu = wish->path_mtu;
        now.dest_qp_num = wish->dest_qp_num;
        now.rq_psn = wish->rq_psn;
        now.max_dest_rd_atomic = wish->max_dest_rd_atomic;
        break;
      }
      case IBV_QPS_RTS:
        needs |= IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                 IBV_QP_MAX_QP_RD_ATOMIC;
        if (handle->state != IBV_QPS_RTR || mask != needs || wish->retry_cnt > 7) {
          return wrong("wrong order or attributes");
        }
        now.sq_psn = wish->sq_psn;
        now.timeout = wish->timeout;
        now.retry_cnt = wish->retry_cnt;
        now.rnr_retry = wish->rnr_retry;
        now.max_rd_atomic = wish->max_rd_atomic;
        break;
      default:
        return wrong("not a state of a reliable connection");
    }
    handle->state = wish->qp_state;
    return 0;
  }
  static int post_send(ibv_qp* handle, ibv_send_wr* request, ibv_send_wr** bad) {
    const Locked fake(handle->context);
    ++fake->stats_.doorbells;
    for (; request != nullptr; request = request->next) {
      if (const int error = fake->post(fake_of<FakeQp>(handle), *request)) {
        *bad = request;
        return error;
      }
    }
    return 0;
  }
  static int post_recv(ibv_qp* handle, ibv_recv_wr* request, ibv_recv_wr** bad) {
    const Locked fake(handle->context);
    auto& qp = fake_of<FakeQp>(handle);
    for (; request != nullptr; request = request->next) {
      if (handle->srq != nullptr || handle->state == IBV_QPS_RESET || request->num_sge != 1 ||
          qp.receives.size() >= qp.limits.cap.max_recv_wr) {
        fake->violation("the receive queue overflows, or is not ready");
        *bad = request;
        return ENOMEM;
      }
      qp.receives.push_back({request->wr_id, request->sg_list[0]});
    }
    if (handle->state == IBV_QPS_ERR) fake->to_error(qp);
    return 0;
  }
};

void add_queue_calls(verbs::VerbsApi& api) {
  using Calls = FakeQueueCalls;
  api.ibv_create_srq = Calls::create_srq;
  api.ibv_destroy_srq = Calls::destroy_srq;
  api.ibv_create_qp = Calls::create_qp;
  api.ibv_modify_qp = Calls::modify_qp;
  api.ibv_destroy_qp = Calls::destroy_qp;
}

void add_queue_calls(ibv_context_ops& ops) {
  ops.post_send = FakeQueueCalls::post_send;
  ops.post_recv = FakeQueueCalls::post_recv;
  ops.post_srq_recv = FakeQueueCalls::post_srq_recv;
}

}  // namespace baton
