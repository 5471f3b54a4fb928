// The fake itself, and the faults that tests inject.
#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "tests/verbs/fake/fake_objects.h"
#include "tests/verbs/fake/fake_verbs.h"

namespace baton {

FakeVerbs* FakeVerbs::current_ = nullptr;

FakeVerbs::FakeVerbs(const FakeOptions& options)
    : options_(options), devices_(options.devices), late_random_(options.late_writes) {
  if (options_.clock == nullptr) options_.clock = &Clock::steady();
  current_ = this;
  // Number 0 names none.
  regions_.push_back(nullptr);
  queue_pairs_.push_back(nullptr);
  for (size_t i = 0; i < devices_.size(); ++i) {
    const std::string name = absl::StrCat("fake", i);
    std::copy(name.begin(), name.end(), devices_[i].device.name);
    devices_[i].gids = default_gids(i);
  }
  api_ = fake_calls();
}

FakeVerbs::~FakeVerbs() { current_ = nullptr; }

std::vector<ibv_gid_entry> FakeVerbs::default_gids(size_t device) {
  std::vector<ibv_gid_entry> gids(4);
  for (uint32_t i = 0; i < 4; ++i) {
    gids[i].gid_index = i;
    gids[i].port_num = 1;
    gids[i].gid_type = i % 2 == 0 ? IBV_GID_TYPE_ROCE_V1 : IBV_GID_TYPE_ROCE_V2;
    uint8_t* raw = gids[i].gid.raw;
    const auto number = static_cast<uint8_t>(device);
    if (i < 2) {
      const uint8_t link_local[16] = {0xfe, 0x80, 0, 0,    0,    0, 0,      0,
                                      2,    0,    0, 0xff, 0xfe, 0, number, 1};
      std::copy_n(link_local, 16, raw);
    } else {
      const uint8_t ipv4[16] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, number, 1};
      std::copy_n(ipv4, 16, raw);
    }
  }
  return gids;
}

void FakeVerbs::violation(std::string what) {
  if (violations_.size() < 100) violations_.push_back(std::move(what));
}

size_t FakeVerbs::index_of(const ibv_device* device) const {
  size_t i = 0;
  while (&devices_[i].device != device) ++i;
  return i;
}

FakeMr* FakeVerbs::find_region(uint32_t key) const {
  return key < regions_.size() ? regions_[key] : nullptr;
}

FakeQp* FakeVerbs::find_queue_pair(uint32_t number) const {
  return number < queue_pairs_.size() ? queue_pairs_[number] : nullptr;
}

std::vector<ibv_qp_attr> FakeVerbs::connected() const {
  std::lock_guard lock(mutex_);
  std::vector<ibv_qp_attr> out;
  for (const FakeQp* qp : queue_pairs_) {
    if (qp != nullptr && qp->qp.state == IBV_QPS_RTS) out.push_back(qp->attributes);
  }
  return out;
}

// To everyone who has the device open.
void FakeVerbs::raise(size_t device, ibv_event_type type) {
  ibv_async_event event{};
  event.element.port_num = 1;
  event.event_type = type;
  for (const auto& context : contexts_) {
    if (context->device == device) report(*context, event);
  }
}

void FakeVerbs::set_port(size_t device, bool up) {
  std::lock_guard lock(mutex_);
  devices_[device].port_up = up;
  raise(device, up ? IBV_EVENT_PORT_ACTIVE : IBV_EVENT_PORT_ERR);
}

void FakeVerbs::kill(size_t device) {
  std::lock_guard lock(mutex_);
  devices_[device].dead = true;
  raise(device, IBV_EVENT_DEVICE_FATAL);
}

void FakeVerbs::set_gids(size_t device, std::vector<ibv_gid_entry> gids) {
  std::lock_guard lock(mutex_);
  devices_[device].gids = std::move(gids);
  raise(device, IBV_EVENT_GID_CHANGE);
}

void FakeVerbs::break_queue_pairs(size_t device) {
  std::lock_guard lock(mutex_);
  for (FakeQp* qp : running_) {
    const bool connected = qp->qp.state == IBV_QPS_RTR || qp->qp.state == IBV_QPS_RTS;
    if (qp->context->device != device || !connected) continue;
    to_error(*qp);
    report(*qp, IBV_EVENT_QP_FATAL);
  }
}

void FakeVerbs::break_completion_queues(size_t device) {
  std::lock_guard lock(mutex_);
  for (FakeCq* queue : completion_queues_) {
    FakeContext& context = fake_of_context(queue->cq.context);
    if (context.device != device) continue;
    queue->broken = true;
    ibv_async_event event{};
    event.element.cq = &queue->cq;
    event.event_type = IBV_EVENT_CQ_ERR;
    report(context, event);
  }
}

void FakeVerbs::break_shared_receives(size_t device) {
  std::lock_guard lock(mutex_);
  for (FakeSrq* queue : shared_) {
    FakeContext& context = fake_of_context(queue->srq.context);
    if (context.device != device) continue;
    queue->broken = true;
    queue->receives.clear();
    ibv_async_event event{};
    event.element.srq = &queue->srq;
    event.event_type = IBV_EVENT_SRQ_ERR;
    report(context, event);
  }
}

void FakeVerbs::report(FakeContext& context, const ibv_async_event& event) {
  context.events.push_back(event);
  const uint64_t one = 1;
  [[maybe_unused]] ssize_t put = write(context.context().async_fd, &one, sizeof one);
}

void FakeVerbs::report(FakeQp& qp, ibv_event_type type) {
  ibv_async_event event{};
  event.element.qp = &qp.qp;
  event.event_type = type;
  report(*qp.context, event);
}

void FakeVerbs::take_receives(size_t device) {
  std::lock_guard lock(mutex_);
  for (FakeQp* qp : running_) {
    if (qp->context->device != device) continue;
    while (!qp->receive_ring().empty()) qp->receive_ring().pop_front();
  }
}

bool FakeVerbs::linked(size_t device) const {
  std::lock_guard lock(mutex_);
  const FakeDevice& d = devices_[device];
  return d.port_up && d.cable && !d.dead;
}

size_t FakeVerbs::shared_receives() const {
  std::lock_guard lock(mutex_);
  size_t posted = 0;
  for (const FakeSrq* queue : shared_) posted += queue->receives.size();
  return posted;
}

// The fake's table of calls, put together.
verbs::VerbsApi fake_calls() {
  verbs::VerbsApi api{};
  add_device_calls(api);
  add_memory_calls(api);
  add_completion_calls(api);
  add_queue_calls(api);
  return api;
}

bool take_count(int fd) {
  uint64_t count = 0;
  return read(fd, &count, sizeof count) == sizeof count;
}

}  // namespace baton
