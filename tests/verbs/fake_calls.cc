// The fake's control path: the table of calls.
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "absl/strings/str_cat.h"
#include "tests/verbs/fake_objects.h"

namespace baton {
namespace {

bool take(int fd) {
  uint64_t count = 0;
  return read(fd, &count, sizeof count) == sizeof count;
}

}  // namespace

// The functions of the table. Each takes the lock.
struct FakeCalls {
  using Lock = std::lock_guard<std::mutex>;
  static FakeVerbs& of(ibv_context* context) { return *fake_of_context(context).fake; }

  static ibv_device** get_device_list(int* count) {
    const size_t n = FakeVerbs::current_->devices_.size();
    auto** list = new ibv_device*[n + 1]();
    for (size_t i = 0; i < n; ++i) list[i] = &FakeVerbs::current_->devices_[i].device;
    if (count != nullptr) *count = static_cast<int>(n);
    return list;
  }
  static void free_device_list(ibv_device** list) { delete[] list; }
  static const char* get_device_name(ibv_device* device) { return device->name; }

  static ibv_context* open_device(ibv_device* device) {
    Lock lock(FakeVerbs::current_->mutex_);
    auto made = std::make_unique<FakeContext>();
    made->fake = FakeVerbs::current_;
    made->device = FakeVerbs::current_->index_of(device);
    made->extended.sz = sizeof(verbs_context);
    made->extended.query_port = query_port;
    ibv_context& context = made->context();
    context.device = device;
    context.abi_compat = __VERBS_ABI_IS_EXTENDED;
    context.async_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK | EFD_SEMAPHORE);
    context.ops.post_send = post_send;
    context.ops.post_recv = post_recv;
    context.ops.post_srq_recv = post_srq_recv;
    context.ops.poll_cq = poll_cq;
    context.ops.req_notify_cq = req_notify_cq;
    ++FakeVerbs::current_->objects_;
    FakeVerbs::current_->contexts_.push_back(std::move(made));
    return &context;
  }
  static int close_device(ibv_context* context) {
    FakeVerbs& fake = of(context);
    Lock lock(fake.mutex_);
    FakeContext& c = fake_of_context(context);
    if (c.users != 0) fake.violation("a device closed while its objects exist");
    ::close(context->async_fd);
    --fake.objects_;
    std::erase_if(fake.contexts_, [&](const auto& each) { return each.get() == &c; });
    return 0;
  }
  static int query_device(ibv_context* context, ibv_device_attr* attributes) {
    const FakeOptions& options = of(context).options_;
    *attributes = {};
    attributes->max_qp_wr = options.max_work;
    attributes->max_sge = options.max_sge;
    attributes->max_sge_rd = options.max_sge_rd;
    attributes->max_cqe = 2 * options.max_work;
    attributes->max_qp_rd_atom = options.max_reads;
    attributes->max_qp_init_rd_atom = options.max_reads;
    attributes->max_srq = options.max_shared > 0 ? 16 : 0;
    attributes->max_srq_wr = options.max_shared;
    attributes->max_srq_sge = 1;
    attributes->max_qp = static_cast<int>(std::min<size_t>(options.max_queue_pairs, 1 << 20));
    attributes->max_mr = static_cast<int>(std::min<size_t>(options.max_regions, 1 << 20));
    attributes->phys_port_cnt = 1;
    return 0;
  }
  static int query_port(ibv_context* context, uint8_t port, ibv_port_attr* attributes, size_t) {
    FakeVerbs& fake = of(context);
    Lock lock(fake.mutex_);
    if (port != 1) return EINVAL;
    const auto& device = fake.devices_[fake_of_context(context).device];
    *attributes = {};
    attributes->state = device.port_up ? IBV_PORT_ACTIVE : IBV_PORT_DOWN;
    attributes->max_mtu = attributes->active_mtu = fake.options_.mtu;
    attributes->gid_tbl_len = 16;
    attributes->max_msg_sz = fake.options_.max_message;
    attributes->active_width = 2;
    const auto& speeds = fake.options_.speeds;
    const size_t index = fake_of_context(context).device;
    attributes->active_speed = index < speeds.size() ? speeds[index] : 32;
    attributes->link_layer = IBV_LINK_LAYER_ETHERNET;
    return 0;
  }
  static ssize_t query_gid_table(ibv_context* context, ibv_gid_entry* entries, size_t most,
                                 uint32_t, size_t) {
    FakeVerbs& fake = of(context);
    Lock lock(fake.mutex_);
    const auto& gids = fake.devices_[fake_of_context(context).device].gids;
    const size_t count = std::min(most, gids.size());
    std::copy_n(gids.begin(), count, entries);
    return static_cast<ssize_t>(count);
  }

  static ibv_pd* alloc_pd(ibv_context* context) {
    FakeVerbs& fake = of(context);
    Lock lock(fake.mutex_);
    auto* made = new FakePd;
    made->pd.context = context;
    ++fake_of_context(context).users;
    ++fake.objects_;
    return &made->pd;
  }
  static int dealloc_pd(ibv_pd* pd) {
    FakeVerbs& fake = of(pd->context);
    Lock lock(fake.mutex_);
    auto& domain = fake_of<FakePd>(pd);
    if (domain.users != 0) fake.violation("a protection domain freed while its objects exist");
    --fake_of_context(pd->context).users;
    --fake.objects_;
    delete &domain;
    return 0;
  }

  static ibv_mr* reg_mr_iova2(ibv_pd* pd, void* data, size_t bytes, uint64_t, unsigned access) {
    FakeVerbs& fake = of(pd->context);
    Lock lock(fake.mutex_);
    FakeContext& context = fake_of_context(pd->context);
    if (!fake.fork_safe_) fake.violation("memory registered before ibv_fork_init()");
    if (context.regions >= fake.options_.max_regions ||
        bytes >
            fake.options_.pinnable_bytes - std::min(fake.options_.pinnable_bytes, context.pinned)) {
      errno = ENOMEM;
      return nullptr;
    }
    context.pinned += bytes;
    ++context.regions;
    auto* made = new FakeMr;
    made->access = access;
    made->mr.context = pd->context;
    made->mr.pd = pd;
    made->mr.addr = data;
    made->mr.length = bytes;
    made->mr.lkey = made->mr.rkey = static_cast<uint32_t>(fake.regions_.size());
    fake.regions_.push_back(made);
    ++fake_of<FakePd>(pd).users;
    ++fake.objects_;
    return &made->mr;
  }
  static ibv_mr* reg_mr(ibv_pd* pd, void* data, size_t bytes, int access) {
    return reg_mr_iova2(pd, data, bytes, 0, static_cast<unsigned>(access));
  }
  static ibv_mr* reg_dmabuf_mr(ibv_pd* pd, uint64_t offset, size_t bytes, uint64_t address, int fd,
                               int access) {
    FakeVerbs& fake = of(pd->context);
    struct stat file {};
    if (!fake.options_.dma_buf) {
      errno = EOPNOTSUPP;
      return nullptr;
    }
    if (fstat(fd, &file) != 0) return nullptr;  // EBADF
    if (offset + bytes > static_cast<uint64_t>(file.st_size)) {
      errno = EINVAL;
      return nullptr;
    }
    {
      Lock lock(fake.mutex_);
      ++fake.stats_.dma_bufs;
    }
    return reg_mr_iova2(pd, reinterpret_cast<void*>(address), bytes, address,
                        static_cast<unsigned>(access));
  }
  static int dereg_mr(ibv_mr* mr) {
    FakeVerbs& fake = of(mr->context);
    Lock lock(fake.mutex_);
    fake.regions_[mr->lkey] = nullptr;
    fake_of_context(mr->context).pinned -= mr->length;
    --fake_of_context(mr->context).regions;
    --fake_of<FakePd>(mr->pd).users;
    --fake.objects_;
    delete &fake_of<FakeMr>(mr);
    return 0;
  }

  static ibv_comp_channel* create_comp_channel(ibv_context* context) {
    FakeVerbs& fake = of(context);
    Lock lock(fake.mutex_);
    auto* made = new FakeChannel;
    made->channel.context = context;
    made->channel.fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK | EFD_SEMAPHORE);
    ++fake_of_context(context).users;
    ++fake.objects_;
    return &made->channel;
  }
  static int destroy_comp_channel(ibv_comp_channel* channel) {
    FakeVerbs& fake = of(channel->context);
    Lock lock(fake.mutex_);
    if (channel->refcnt != 0) fake.violation("a completion channel freed while in use");
    ::close(channel->fd);
    --fake_of_context(channel->context).users;
    --fake.objects_;
    delete &fake_of<FakeChannel>(channel);
    return 0;
  }
  static int get_cq_event(ibv_comp_channel* channel, ibv_cq** queue, void** context) {
    FakeVerbs& fake = of(channel->context);
    Lock lock(fake.mutex_);
    auto& events = fake_of<FakeChannel>(channel).events;
    if (!take(channel->fd) || events.empty()) {
      errno = EAGAIN;
      return -1;
    }
    *queue = events.front();
    *context = (*queue)->cq_context;
    events.pop_front();
    return 0;
  }
  static void ack_cq_events(ibv_cq*, unsigned) {}

  static ibv_cq* create_cq(ibv_context* context, int entries, void* user, ibv_comp_channel* channel,
                           int) {
    FakeVerbs& fake = of(context);
    Lock lock(fake.mutex_);
    if (entries < 1 || entries > 2 * fake.options_.max_work) {
      errno = EINVAL;
      return nullptr;
    }
    auto* made = new FakeCq;
    made->cq.context = context;
    made->cq.cq_context = user;
    made->cq.cqe = entries;
    made->cq.channel = channel;
    if (channel != nullptr) ++channel->refcnt;
    ++fake_of_context(context).users;
    ++fake.objects_;
    return &made->cq;
  }
  static int destroy_cq(ibv_cq* queue) {
    FakeVerbs& fake = of(queue->context);
    Lock lock(fake.mutex_);
    auto& cq = fake_of<FakeCq>(queue);
    if (cq.users != 0) fake.violation("a completion queue freed while a queue pair uses it");
    if (queue->channel != nullptr) {
      --queue->channel->refcnt;
      fake_of<FakeChannel>(queue->channel).events.remove_if([&](ibv_cq* each) {
        return each == queue && take(queue->channel->fd);
      });
    }
    --fake_of_context(queue->context).users;
    --fake.objects_;
    delete &cq;
    return 0;
  }
  static int poll_cq(ibv_cq* queue, int most, ibv_wc* out) {
    FakeVerbs& fake = of(queue->context);
    Lock lock(fake.mutex_);
    fake.run(fake.options_.bytes_per_poll);
    auto& cq = fake_of<FakeCq>(queue);
    int count = 0;
    for (; count < most && !cq.entries.empty(); ++count) {
      const FakeCq::Entry& entry = cq.entries.front();
      out[count] = entry.completion;
      if (entry.qp != nullptr) entry.qp->used -= entry.retires;
      cq.entries.pop_front();
    }
    return count;
  }
  static int req_notify_cq(ibv_cq* queue, int) {
    FakeVerbs& fake = of(queue->context);
    Lock lock(fake.mutex_);
    fake_of<FakeCq>(queue).armed = true;
    fake.run(SIZE_MAX);
    return 0;
  }

  static ibv_srq* create_srq(ibv_pd* pd, ibv_srq_init_attr* wish) {
    FakeVerbs& fake = of(pd->context);
    Lock lock(fake.mutex_);
    if (wish->attr.max_wr < 1 || static_cast<int>(wish->attr.max_wr) > fake.options_.max_shared ||
        wish->attr.max_sge != 1) {
      errno = EINVAL;
      return nullptr;
    }
    auto* made = new FakeSrq;
    made->srq.context = pd->context;
    made->srq.pd = pd;
    made->most = wish->attr.max_wr;
    ++fake_of<FakePd>(pd).users;
    ++fake.objects_;
    fake.shared_.push_back(made);
    return &made->srq;
  }
  static int destroy_srq(ibv_srq* handle) {
    FakeVerbs& fake = of(handle->context);
    Lock lock(fake.mutex_);
    auto& queue = fake_of<FakeSrq>(handle);
    if (queue.users != 0) fake.violation("a shared receive queue freed while a queue pair uses it");
    std::erase(fake.shared_, &queue);
    --fake_of<FakePd>(handle->pd).users;
    --fake.objects_;
    delete &queue;
    return 0;
  }
  static int post_srq_recv(ibv_srq* handle, ibv_recv_wr* request, ibv_recv_wr** bad) {
    FakeVerbs& fake = of(handle->context);
    Lock lock(fake.mutex_);
    auto& queue = fake_of<FakeSrq>(handle);
    for (; request != nullptr; request = request->next) {
      if (request->num_sge != 1 || queue.receives.size() >= queue.most) {
        fake.violation("the shared receive queue overflows");
        *bad = request;
        return ENOMEM;
      }
      queue.receives.push_back({request->wr_id, request->sg_list[0]});
    }
    return 0;
  }

  static ibv_qp* create_qp(ibv_pd* pd, ibv_qp_init_attr* wish) {
    FakeVerbs& fake = of(pd->context);
    Lock lock(fake.mutex_);
    const FakeOptions& options = fake.options_;
    const ibv_qp_cap& cap = wish->cap;
    if (fake.running_.size() >= options.max_queue_pairs) {
      errno = ENOMEM;
      return nullptr;
    }
    if (wish->qp_type != IBV_QPT_RC || static_cast<int>(cap.max_send_wr) > options.max_work ||
        static_cast<int>(cap.max_recv_wr) > options.max_work ||
        static_cast<int>(cap.max_send_sge) > options.max_sge ||
        cap.max_send_sge > FakeWork::kMaxSge || cap.max_inline_data > options.max_inline) {
      errno = EINVAL;
      return nullptr;
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
    qp.qp_num = static_cast<uint32_t>(fake.queue_pairs_.size());
    qp.state = IBV_QPS_RESET;
    qp.qp_type = wish->qp_type;
    fake.queue_pairs_.push_back(made);
    fake.running_.push_back(made);
    ++made->send_queue().users;
    ++fake_of<FakePd>(pd).users;
    ++fake.objects_;
    ++fake.stats_.queue_pairs;
    return &qp;
  }
  static int destroy_qp(ibv_qp* handle) {
    FakeVerbs& fake = of(handle->context);
    Lock lock(fake.mutex_);
    auto& qp = fake_of<FakeQp>(handle);
    // Its completions go with it.
    for (FakeCq* queue : {&qp.send_queue(), &qp.receive_queue()}) {
      queue->entries.remove_if(
          [&](const FakeCq::Entry& entry) { return entry.completion.qp_num == handle->qp_num; });
    }
    fake.queue_pairs_[handle->qp_num] = nullptr;
    std::erase(fake.running_, &qp);
    if (handle->srq != nullptr) --fake_of<FakeSrq>(handle->srq).users;
    --qp.send_queue().users;
    --fake_of<FakePd>(handle->pd).users;
    --fake.objects_;
    delete &qp;
    return 0;
  }
  static int modify_qp(ibv_qp* handle, ibv_qp_attr* wish, int mask) {
    FakeVerbs& fake = of(handle->context);
    Lock lock(fake.mutex_);
    auto& qp = fake_of<FakeQp>(handle);
    ibv_qp_attr& now = qp.attributes;
    const auto wrong = [&](const char* what) {
      fake.violation(absl::StrCat("modifying a queue pair in state ", handle->state, " to ",
                                  wish->qp_state, ": ", what));
      return EINVAL;
    };
    if (!(mask & IBV_QP_STATE)) return wrong("no state given");
    int needs = IBV_QP_STATE;
    switch (wish->qp_state) {
      case IBV_QPS_ERR:
        if (handle->state != IBV_QPS_ERR) fake.to_error(qp);
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
        if (wish->path_mtu > fake.options_.mtu ||
            wish->max_dest_rd_atomic > fake.options_.max_reads) {
          return wrong("beyond the device's limits");
        }
        const auto& gids = fake.devices_[qp.context->device].gids;
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
    FakeVerbs& fake = of(handle->context);
    Lock lock(fake.mutex_);
    ++fake.stats_.doorbells;
    for (; request != nullptr; request = request->next) {
      if (const int error = fake.post(fake_of<FakeQp>(handle), *request)) {
        *bad = request;
        return error;
      }
    }
    return 0;
  }
  static int post_recv(ibv_qp* handle, ibv_recv_wr* request, ibv_recv_wr** bad) {
    FakeVerbs& fake = of(handle->context);
    Lock lock(fake.mutex_);
    auto& qp = fake_of<FakeQp>(handle);
    for (; request != nullptr; request = request->next) {
      if (handle->srq != nullptr || handle->state == IBV_QPS_RESET || request->num_sge != 1 ||
          qp.receives.size() >= qp.limits.cap.max_recv_wr) {
        fake.violation("the receive queue overflows, or is not ready");
        *bad = request;
        return ENOMEM;
      }
      qp.receives.push_back({request->wr_id, request->sg_list[0]});
    }
    if (handle->state == IBV_QPS_ERR) fake.to_error(qp);
    return 0;
  }

  static int get_async_event(ibv_context* context, ibv_async_event* event) {
    FakeVerbs& fake = of(context);
    Lock lock(fake.mutex_);
    auto& events = fake_of_context(context).events;
    if (!take(context->async_fd) || events.empty()) {
      errno = EAGAIN;
      return -1;
    }
    *event = events.front();
    events.pop_front();
    return 0;
  }
  static void ack_async_event(ibv_async_event*) {}
  static int fork_init() {
    FakeVerbs::current_->fork_safe_ = true;
    return 0;
  }
};

verbs::VerbsApi fake_calls() {
  return {.ibv_get_device_list = FakeCalls::get_device_list,
          .ibv_free_device_list = FakeCalls::free_device_list,
          .ibv_get_device_name = FakeCalls::get_device_name,
          .ibv_open_device = FakeCalls::open_device,
          .ibv_close_device = FakeCalls::close_device,
          .ibv_query_device = FakeCalls::query_device,
          ._ibv_query_gid_table = FakeCalls::query_gid_table,
          .ibv_alloc_pd = FakeCalls::alloc_pd,
          .ibv_dealloc_pd = FakeCalls::dealloc_pd,
          .ibv_reg_mr = FakeCalls::reg_mr,
          .ibv_reg_mr_iova2 = FakeCalls::reg_mr_iova2,
          .ibv_dereg_mr = FakeCalls::dereg_mr,
          .ibv_create_comp_channel = FakeCalls::create_comp_channel,
          .ibv_destroy_comp_channel = FakeCalls::destroy_comp_channel,
          .ibv_get_cq_event = FakeCalls::get_cq_event,
          .ibv_ack_cq_events = FakeCalls::ack_cq_events,
          .ibv_create_cq = FakeCalls::create_cq,
          .ibv_destroy_cq = FakeCalls::destroy_cq,
          .ibv_create_srq = FakeCalls::create_srq,
          .ibv_destroy_srq = FakeCalls::destroy_srq,
          .ibv_create_qp = FakeCalls::create_qp,
          .ibv_modify_qp = FakeCalls::modify_qp,
          .ibv_destroy_qp = FakeCalls::destroy_qp,
          .ibv_get_async_event = FakeCalls::get_async_event,
          .ibv_ack_async_event = FakeCalls::ack_async_event,
          .ibv_fork_init = FakeCalls::fork_init,
          .ibv_reg_dmabuf_mr = FakeCalls::reg_dmabuf_mr};
}

}  // namespace baton
