// The fake's devices: opening, limits, ports, GIDs, asynchronous events.
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "tests/verbs/fake/fake_objects.h"

namespace baton {

struct FakeDeviceCalls : FakeCall {
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
    add_completion_calls(context.ops);
    add_queue_calls(context.ops);
    ++FakeVerbs::current_->objects_;
    FakeVerbs::current_->contexts_.push_back(std::move(made));
    return &context;
  }
  static int close_device(ibv_context* context) {
    const Locked fake(context);
    FakeContext& c = fake_of_context(context);
    if (c.users != 0) fake->violation("a device closed while its objects exist");
    ::close(context->async_fd);
    --fake->objects_;
    std::erase_if(fake->contexts_, [&](const auto& each) { return each.get() == &c; });
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
    const Locked fake(context);
    if (port != 1) return EINVAL;
    const auto& device = fake->devices_[fake_of_context(context).device];
    *attributes = {};
    attributes->state = device.port_up ? IBV_PORT_ACTIVE : IBV_PORT_DOWN;
    attributes->max_mtu = attributes->active_mtu = fake->options_.mtu;
    attributes->gid_tbl_len = 16;
    attributes->max_msg_sz = fake->options_.max_message;
    attributes->active_width = 2;
    const auto& speeds = fake->options_.speeds;
    const size_t index = fake_of_context(context).device;
    attributes->active_speed = index < speeds.size() ? speeds[index] : 32;
    attributes->link_layer = IBV_LINK_LAYER_ETHERNET;
    return 0;
  }
  static ssize_t query_gid_table(ibv_context* context, ibv_gid_entry* entries, size_t most,
                                 uint32_t, size_t) {
    const Locked fake(context);
    const auto& gids = fake->devices_[fake_of_context(context).device].gids;
    const size_t count = std::min(most, gids.size());
    std::copy_n(gids.begin(), count, entries);
    return static_cast<ssize_t>(count);
  }
  static int get_async_event(ibv_context* context, ibv_async_event* event) {
    const Locked fake(context);
    auto& events = fake_of_context(context).events;
    if (!take_count(context->async_fd) || events.empty()) {
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

void add_device_calls(verbs::VerbsApi& api) {
  using Calls = FakeDeviceCalls;
  api.ibv_get_device_list = Calls::get_device_list;
  api.ibv_free_device_list = Calls::free_device_list;
  api.ibv_get_device_name = Calls::get_device_name;
  api.ibv_open_device = Calls::open_device;
  api.ibv_close_device = Calls::close_device;
  api.ibv_query_device = Calls::query_device;
  api._ibv_query_gid_table = Calls::query_gid_table;
  api.ibv_get_async_event = Calls::get_async_event;
  api.ibv_ack_async_event = Calls::ack_async_event;
  api.ibv_fork_init = Calls::fork_init;
}

}  // namespace baton
