// The fake connection manager's table of calls.
#include <arpa/inet.h>
#include <sys/eventfd.h>

#include "absl/strings/str_cat.h"
#include "tests/std.h"
#include "tests/verbs/fake/fake_cm_objects.h"

namespace baton {

struct FakeCmCalls {
  using Lock = std::lock_guard<std::mutex>;
  using State = FakeCmId::State;
  static FakeCm& cm() { return *FakeCm::current_; }
  static int refuse(int error) {
    errno = error;
    return -1;
  }
  static int wrong(const char* call) {
    cm().violation(absl::StrCat(call, " out of order"));
    return refuse(EINVAL);
  }

  static rdma_event_channel* create_event_channel() {
    Lock lock(cm().mutex_);
    if (cm().missing) {
      errno = ENODEV;
      return nullptr;
    }
    auto made = std::make_unique<FakeCmChannel>();
    made->channel.fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
    cm().channels_.push_back(std::move(made));
    return &cm().channels_.back()->channel;
  }
  static void destroy_event_channel(rdma_event_channel* channel) {
    Lock lock(cm().mutex_);
    if (!fake_of(channel).unacknowledged.empty()) cm().violation("a channel destroyed with events");
    for (const auto& id : cm().ids_) {
      if (id->channel == &fake_of(channel))
        cm().violation("a channel destroyed before its identifiers");
    }
    close(channel->fd);
    cm().channels_.remove_if([&](const auto& each) { return &each->channel == channel; });
  }
  static int get_event(rdma_event_channel* channel, rdma_cm_event** out) {
    Lock lock(cm().mutex_);
    FakeCmChannel& c = fake_of(channel);
    if ((fcntl(channel->fd, F_GETFL) & O_NONBLOCK) == 0) cm().violation("a read that may block");
    uint64_t one = 0;
    if (c.events.empty() || read(channel->fd, &one, sizeof one) != sizeof one) {
      return refuse(EAGAIN);
    }
    c.unacknowledged.splice(c.unacknowledged.end(), c.events, c.events.begin());
    *out = &c.unacknowledged.back()->event;
    return 0;
  }
  static int acknowledge(rdma_cm_event* event) {
    Lock lock(cm().mutex_);
    for (const auto& channel : cm().channels_) {
      const size_t count = channel->unacknowledged.remove_if(
          [&](const auto& each) { return &each->event == event; });
      if (count == 1) return 0;
    }
    cm().violation("an event acknowledged twice");
    return refuse(EINVAL);
  }

  static int create_id(rdma_event_channel* channel, rdma_cm_id** out, void* context,
                       rdma_port_space space) {
    Lock lock(cm().mutex_);
    if (space != RDMA_PS_TCP) return refuse(EINVAL);
    *out = &cm().make(fake_of(channel), context).id;
    return 0;
  }
  static int destroy_id(rdma_cm_id* id) {
    Lock lock(cm().mutex_);
    cm().destroy(fake_of(id));
    return 0;
  }
  static int set_option(rdma_cm_id* id, int, int, void*, size_t) {
    Lock lock(cm().mutex_);
    return fake_of(id).state == State::kNew ? 0 : wrong("rdma_set_option");
  }
  static int bind_addr(rdma_cm_id* id, sockaddr* address) {
    Lock lock(cm().mutex_);
    if (fake_of(id).state != State::kNew) return wrong("rdma_bind_addr");
    if (address->sa_family == AF_INET6) return refuse(EAFNOSUPPORT);
    fake_of(id).state = State::kBound;
    return 0;
  }
  static int listen(rdma_cm_id* id, int) {
    Lock lock(cm().mutex_);
    if (fake_of(id).state != State::kBound) return wrong("rdma_listen");
    fake_of(id).port = cm().next_port_++;
    fake_of(id).state = State::kListening;
    return 0;
  }
  static __be16 get_src_port(rdma_cm_id* id) {
    Lock lock(cm().mutex_);
    return htons(fake_of(id).port);
  }
  static int resolve_addr(rdma_cm_id* handle, sockaddr* from, sockaddr* to, int timeout) {
    Lock lock(cm().mutex_);
    FakeCmId& id = fake_of(handle);
    if (id.state != State::kNew || timeout <= 0) return wrong("rdma_resolve_addr");
    const int here = cm().device_of(from), there = cm().device_of(to);
    sockaddr_in target;
    std::memcpy(&target, to, sizeof target);
    id.port = ntohs(target.sin_port);
    id.next = [&id, here, there] {
      if (cm().unroutable || here < 0 || there < 0) {
        return cm().push(id, RDMA_CM_EVENT_ADDR_ERROR, -EHOSTUNREACH);
      }
      const int by = cm().wrong_device >= 0 ? cm().wrong_device : here;
      cm().bind(id, static_cast<size_t>(by));
      id.peer_device = static_cast<size_t>(there);
      id.state = State::kAddress;
      cm().push(id, RDMA_CM_EVENT_ADDR_RESOLVED);
    };
    return 0;
  }
  static int resolve_route(rdma_cm_id* handle, int) {
    Lock lock(cm().mutex_);
    FakeCmId& id = fake_of(handle);
    if (id.state != State::kAddress) return wrong("rdma_resolve_route");
    id.next = [&id] {
      id.state = State::kRoute;
      cm().push(id, RDMA_CM_EVENT_ROUTE_RESOLVED);
    };
    return 0;
  }
  static std::string data_of(const rdma_conn_param& parameter, size_t most) {
    if (parameter.private_data_len > most) cm().violation("more private data than the wire takes");
    return {static_cast<const char*>(parameter.private_data), parameter.private_data_len};
  }
  static int connect(rdma_cm_id* handle, rdma_conn_param* parameter) {
    Lock lock(cm().mutex_);
    FakeCmId& id = fake_of(handle);
    if (id.state != State::kRoute) return wrong("rdma_connect");
    id.state = State::kCalling;
    id.queue_pair = parameter->qp_num;
    id.next = [&id, data = data_of(*parameter, 56)] {
      if (cm().silent || !cm().verbs_.linked(id.device) || !cm().verbs_.linked(id.peer_device)) {
        return;
      }
      for (const auto& each : cm().ids_) {
        if (each->state != State::kListening || each->port != id.port) continue;
        if (!cm().nobody_listens) {
          return cm().request(&id, data, id.queue_pair, *each, id.peer_device);
        }
      }
      cm().push(id, RDMA_CM_EVENT_REJECTED, 8);
    };
    return 0;
  }
  static int init_qp_attr(rdma_cm_id* handle, ibv_qp_attr* attributes, int* mask) {
    Lock lock(cm().mutex_);
    FakeCmId& id = fake_of(handle);
    if (id.peer == nullptr || (id.state != State::kCalling && id.state != State::kCalled)) {
      return wrong("rdma_init_qp_attr");
    }
    *mask = IBV_QP_STATE;
    if (attributes->qp_state == IBV_QPS_RTS) {
      attributes->sq_psn = id.sequence;
      id.asked_for_rts = true;
      return 0;
    }
    const auto ipv4 = [&](size_t device) {
      const auto gids = cm().verbs_.gids(device);
      const auto it = std::find_if(gids.begin(), gids.end(), [](const ibv_gid_entry& entry) {
        return entry.gid_type == IBV_GID_TYPE_ROCE_V2 && entry.gid.raw[10] == 0xff;
      });
      return *it;
    };
    attributes->rq_psn = id.peer_sequence;
    attributes->path_mtu = cm().verbs_.mtu();
    attributes->ah_attr.is_global = 1;
    attributes->ah_attr.port_num = 1;
    attributes->ah_attr.grh.hop_limit = 64;
    attributes->ah_attr.grh.traffic_class = cm().traffic_class;
    attributes->ah_attr.grh.sgid_index = static_cast<uint8_t>(ipv4(id.device).gid_index);
    attributes->ah_attr.grh.dgid = ipv4(id.peer->device).gid;
    return 0;
  }
  static int accept(rdma_cm_id* handle, rdma_conn_param* parameter) {
    Lock lock(cm().mutex_);
    FakeCmId& id = fake_of(handle);
    if (id.state != State::kCalled || !id.asked_for_rts) return wrong("rdma_accept");
    id.state = State::kUp;
    if (id.peer == nullptr) return refuse(ECONNRESET);
    std::string data = data_of(*parameter, 196);
    if (cm().impostor) data.back() = static_cast<char>(data.back() ^ 1);
    if (cm().deaf_[id.peer->device]) return 0;
    cm().push(*id.peer, RDMA_CM_EVENT_CONNECT_RESPONSE, 0, data, parameter->qp_num);
    return 0;
  }
  static int establish(rdma_cm_id* handle) {
    Lock lock(cm().mutex_);
    FakeCmId& id = fake_of(handle);
    if (id.state != State::kCalling || !id.asked_for_rts) return wrong("rdma_establish");
    id.state = State::kUp;
    ++cm().established_;
    if (id.peer != nullptr) cm().push(*id.peer, RDMA_CM_EVENT_ESTABLISHED);
    return 0;
  }
  static int reject(rdma_cm_id* handle, const void* data, uint8_t bytes) {
    Lock lock(cm().mutex_);
    FakeCmId& id = fake_of(handle);
    if (id.state != State::kCalled || bytes > 148) return wrong("rdma_reject");
    id.state = State::kOver;
    const std::string text(static_cast<const char*>(data), bytes);
    if (id.stranger) {
      ++cm().rejected_;
      cm().last_rejection_ = text;
    } else if (id.peer != nullptr) {
      cm().push(*id.peer, RDMA_CM_EVENT_REJECTED, 28, text);
      id.peer->peer = nullptr;
    }
    id.peer = nullptr;
    return 0;
  }
};

verbs::CmApi fake_cm_calls() {
  using Calls = FakeCmCalls;
  return {.rdma_create_event_channel = Calls::create_event_channel,
          .rdma_destroy_event_channel = Calls::destroy_event_channel,
          .rdma_get_cm_event = Calls::get_event,
          .rdma_ack_cm_event = Calls::acknowledge,
          .rdma_create_id = Calls::create_id,
          .rdma_destroy_id = Calls::destroy_id,
          .rdma_set_option = Calls::set_option,
          .rdma_bind_addr = Calls::bind_addr,
          .rdma_listen = Calls::listen,
          .rdma_get_src_port = Calls::get_src_port,
          .rdma_resolve_addr = Calls::resolve_addr,
          .rdma_resolve_route = Calls::resolve_route,
          .rdma_init_qp_attr = Calls::init_qp_attr,
          .rdma_connect = Calls::connect,
          .rdma_establish = Calls::establish,
          .rdma_accept = Calls::accept,
          .rdma_reject = Calls::reject};
}

}  // namespace baton
