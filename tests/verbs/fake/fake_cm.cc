// The fake connection manager: who calls whom, what comes of it, and the faults that tests inject.
#include "tests/verbs/fake/fake_cm.h"

#include <arpa/inet.h>

#include "tests/std.h"
#include "tests/verbs/fake/fake_cm_objects.h"

namespace baton {

FakeCm* FakeCm::current_ = nullptr;

FakeCm::FakeCm(FakeVerbs& verbs) : verbs_(verbs) {
  current_ = this;
  int count = 0;
  ibv_device** devices = verbs.api().ibv_get_device_list(&count);
  for (int i = 0; i < count; ++i) {
    contexts_.push_back(std::make_unique<ibv_context>());
    contexts_.back()->device = devices[i];
  }
  verbs.api().ibv_free_device_list(devices);
  deaf_.resize(contexts_.size());
  api_ = fake_cm_calls();
}

FakeCm::~FakeCm() { current_ = nullptr; }

void FakeCm::violation(std::string what) {
  if (violations_.size() < 100) violations_.push_back(std::move(what));
}

FakeCmId& FakeCm::make(FakeCmChannel& channel, void* context) {
  ids_.push_back(std::make_unique<FakeCmId>());
  FakeCmId& id = *ids_.back();
  id.channel = &channel;
  id.id.channel = &channel.channel;
  id.id.context = context;
  id.id.ps = RDMA_PS_TCP;
  id.sequence = next_sequence_++;
  return id;
}

void FakeCm::bind(FakeCmId& id, size_t device) {
  id.device = device;
  id.id.verbs = contexts_[device].get();
  id.id.port_num = 1;
}

void FakeCm::push(FakeCmId& id, rdma_cm_event_type type, int status, const std::string& data,
                  uint32_t queue_pair, FakeCmId* listener) {
  auto made = std::make_unique<FakeCmChannel::Event>();
  made->id = listener != nullptr ? listener : &id;
  made->data = data;
  made->event.id = &id.id;
  made->event.listen_id = listener == nullptr ? nullptr : &listener->id;
  made->event.event = type;
  made->event.status = status;
  if (!data.empty()) {
    // Padded to the length of the field, as it comes off the wire.
    made->data.resize(type == RDMA_CM_EVENT_CONNECT_REQUEST ? 56 : 148);
    made->event.param.conn.private_data = made->data.data();
    made->event.param.conn.private_data_len = static_cast<uint8_t>(made->data.size());
  }
  made->event.param.conn.qp_num = queue_pair;
  id.channel->events.push_back(std::move(made));
  const uint64_t one = 1;
  [[maybe_unused]] ssize_t put = write(id.channel->channel.fd, &one, sizeof one);
}

// A call reaches a listener. `caller` null: a stranger's.
void FakeCm::request(FakeCmId* caller, const std::string& data, uint32_t queue_pair,
                     FakeCmId& listener, size_t device) {
  FakeCmId& id = make(*listener.channel, listener.id.context);
  bind(id, device);
  id.state = FakeCmId::State::kCalled;
  id.stranger = caller == nullptr;
  if (caller != nullptr) {
    id.peer = caller;
    caller->peer = &id;
    id.peer_sequence = caller->sequence;
    caller->peer_sequence = id.sequence;
  }
  push(id, RDMA_CM_EVENT_CONNECT_REQUEST, 0, data, queue_pair, &listener);
}

int FakeCm::device_of(const sockaddr* address) const {
  sockaddr_in v4;
  if (address->sa_family != AF_INET) return -1;
  std::memcpy(&v4, address, sizeof v4);
  for (size_t device = 0; device < contexts_.size(); ++device) {
    for (const ibv_gid_entry& entry : verbs_.gids(device)) {
      if (entry.gid.raw[10] == 0xff && std::memcmp(entry.gid.raw + 12, &v4.sin_addr, 4) == 0) {
        return static_cast<int>(device);
      }
    }
  }
  return -1;
}

void FakeCm::destroy(FakeCmId& id) {
  for (const auto& event : id.channel->unacknowledged) {
    if (event->id == &id || event->event.id == &id.id) {
      violation("an identifier destroyed with an event that is not acknowledged");
    }
  }
  // Its events go with it, and a listener's calls.
  std::vector<FakeCmId*> calls;
  id.channel->events.remove_if([&](const auto& event) {
    if (event->id != &id && event->event.id != &id.id) return false;
    if (event->event.id != &id.id) calls.push_back(&fake_of(event->event.id));
    uint64_t one = 0;
    [[maybe_unused]] ssize_t got = read(id.channel->channel.fd, &one, sizeof one);
    return true;
  });
  for (FakeCmId* call : calls) destroy(*call);
  if (id.state == FakeCmId::State::kUp && !verbs_.port_up(id.device)) deaf_[id.device] = true;
  if (id.peer != nullptr) {
    const bool up = id.peer->state == FakeCmId::State::kUp;
    push(*id.peer, up ? RDMA_CM_EVENT_DISCONNECTED : RDMA_CM_EVENT_REJECTED, up ? 0 : 4);
    id.peer->peer = nullptr;
  }
  if (id.stranger && id.state == FakeCmId::State::kCalled) ++rejected_;
  ids_.remove_if([&](const auto& each) { return each.get() == &id; });
}

void FakeCm::tick() {
  std::lock_guard lock(mutex_);
  std::vector<std::function<void()>> due;
  for (const auto& id : ids_) {
    if (id->next) due.push_back(std::exchange(id->next, nullptr));
  }
  for (const auto& each : due) each();
}

void FakeCm::disconnect_all() {
  std::lock_guard lock(mutex_);
  for (const auto& id : ids_) {
    if (id->state == FakeCmId::State::kUp) push(*id, RDMA_CM_EVENT_DISCONNECTED);
  }
}

void FakeCm::remove_device(size_t device) {
  std::lock_guard lock(mutex_);
  for (const auto& id : ids_) {
    if (id->id.verbs != contexts_[device].get()) continue;
    push(*id, RDMA_CM_EVENT_DEVICE_REMOVAL);
  }
}

void FakeCm::call_from_stranger(const std::string& data) {
  std::lock_guard lock(mutex_);
  std::vector<FakeCmId*> listeners;
  for (const auto& id : ids_) {
    if (id->state == FakeCmId::State::kListening) listeners.push_back(id.get());
  }
  for (FakeCmId* listener : listeners) request(nullptr, data, 77, *listener, 0);
}

size_t FakeCm::objects() const {
  std::lock_guard lock(mutex_);
  return ids_.size() + channels_.size();
}

std::vector<std::string> FakeCm::violations() const {
  std::lock_guard lock(mutex_);
  return violations_;
}

}  // namespace baton
