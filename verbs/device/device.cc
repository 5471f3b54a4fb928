// Opens devices, reads ports, registers memory.
#include "verbs/device/device.h"

#include <fcntl.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "transport/internal/device_memory.h"
#include "verbs/device/message.h"

namespace baton::verbs {

QueuePairReaper::~QueuePairReaper() {
  if (!thread_.joinable()) return;
  {
    std::lock_guard lock(mutex_);
    ending_ = true;
  }
  more_.notify_one();
  thread_.join();
}

void QueuePairReaper::reap(std::function<void()> destroy) {
  {
    std::lock_guard lock(mutex_);
    waiting_.push_back(std::move(destroy));
  }
  if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
  more_.notify_one();
}

void QueuePairReaper::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    more_.wait(lock, [this] { return ending_ || !waiting_.empty(); });
    if (waiting_.empty()) return;
    const std::function<void()> destroy = std::move(waiting_.front());
    waiting_.pop_front();
    lock.unlock();
    destroy();
    lock.lock();
  }
}

namespace {

// As ibv_port_attr encodes them.
double lane_gbits(uint8_t speed) {
  switch (speed) {
    case 1:
      return 2.0;  // SDR after 8b/10b
    case 2:
      return 4.0;
    case 4:
    case 8:
      return 9.7;
    case 16:
      return 13.6;
    case 32:
      return 25.0;
    case 64:
      return 50.0;
    case 128:
      return 100.0;
    default:
      return 10.0;
  }
}

int lanes(uint8_t width) {
  switch (width) {
    case 2:
      return 4;
    case 4:
      return 8;
    case 8:
      return 12;
    case 16:
      return 2;
    default:
      return 1;
  }
}

bool set_nonblocking(int fd) {
  const int flags = fcntl(fd, F_GETFL);
  return flags >= 0 && fcntl(fd, F_SETFL, flags | O_NONBLOCK) == 0;
}

absl::Status failed(const std::string& device, const char* what, int error) {
  return absl::UnavailableError(absl::StrFormat("%s: %s: %s", device, what, strerror(error)));
}

std::string memlock_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return "unknown";
  if (limit.rlim_cur == RLIM_INFINITY) return "unlimited";
  return absl::StrFormat("%.1f MiB", static_cast<double>(limit.rlim_cur) / (1 << 20));
}

}  // namespace

std::string Port::name() const { return absl::StrCat(device->name(), ":", number); }

double Port::bytes_per_second() const {
  return lane_gbits(attributes.active_speed) * lanes(attributes.active_width) * 1e9 / 8;
}

absl::StatusOr<std::unique_ptr<Device>> Device::open(const VerbsApi& api, ibv_device* device,
                                                     const Tuning& tuning) {
  std::unique_ptr<Device> opened(new Device(api, api.ibv_get_device_name(device), tuning));
  Device& d = *opened;
  d.context_ = api.ibv_open_device(device);
  if (d.context_ == nullptr) {
    const int error = errno;
    return absl::UnavailableError(
        absl::StrFormat("%s cannot be opened: %s%s", d.name_, strerror(error),
                        error == EACCES || error == EPERM
                            ? "; make /dev/infiniband/uverbs* readable and writable for this user"
                            : ""));
  }
  if (const int error = api.ibv_query_device(d.context_, &d.attributes_)) {
    return failed(d.name_, "reading its limits", error);
  }
  d.pd_ = api.ibv_alloc_pd(d.context_);
  if (d.pd_ == nullptr) return failed(d.name_, "making a protection domain", errno);
  d.channel_ = api.ibv_create_comp_channel(d.context_);
  if (d.channel_ == nullptr) return failed(d.name_, "making a completion channel", errno);
  if (!set_nonblocking(d.channel_->fd) || !set_nonblocking(d.context_->async_fd)) {
    return failed(d.name_, "preparing its descriptors", errno);
  }
  if (tuning.shared_receives > 0 && d.attributes_.max_srq > 0 &&
      d.attributes_.max_srq_wr >= static_cast<int>(ReceivePool::kSlab)) {
    auto pool = ReceivePool::create(d, tuning);
    if (!pool.ok()) return pool.status();
    d.receive_pool_ = *std::move(pool);
  }
  return opened;
}

Device::~Device() {
  reaper_.reset();
  for (ibv_mr* region : regions_) {
    if (region != nullptr) api_.ibv_dereg_mr(region);
  }
  receive_pool_.reset();
  if (channel_ != nullptr) api_.ibv_destroy_comp_channel(channel_);
  if (pd_ != nullptr) api_.ibv_dealloc_pd(pd_);
  if (context_ != nullptr) api_.ibv_close_device(context_);
}

absl::Status Device::refresh(Port& port) const {
  if (const int error = query_port(context_, port.number, &port.attributes)) {
    port.attributes.state = IBV_PORT_DOWN;
    return failed(name_, "reading a port", error);
  }
  std::vector<ibv_gid_entry> all(1024);
  const ssize_t count =
      api_._ibv_query_gid_table(context_, all.data(), all.size(), 0, sizeof(ibv_gid_entry));
  port.gids.clear();
  for (ssize_t i = 0; i < count; ++i) {
    if (all[static_cast<size_t>(i)].port_num == port.number) {
      port.gids.push_back(all[static_cast<size_t>(i)]);
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<ibv_mr*> Device::register_memory(void* data, size_t bytes, int access,
                                                const BackingFile& file) const {
  const auto at = reinterpret_cast<uintptr_t>(data);
  // Optional: the library drops it where kernel or adapter do not know it.
  const int relaxed = access | (relaxed_ ? static_cast<int>(IBV_ACCESS_RELAXED_ORDERING) : 0);
  ibv_mr* region = nullptr;
  if (file.dma_buf) {
    if (absl::Status status = dma_buf(); !status.ok()) return status;
    region = api_.ibv_reg_dmabuf_mr(pd_, file.offset, bytes, at, file.fd, relaxed);
  } else if (relaxed_) {
    region = api_.ibv_reg_mr_iova2(pd_, data, bytes, at, static_cast<unsigned>(relaxed));
  } else {
    region = (api_.ibv_reg_mr)(pd_, data, bytes, access);
  }
  if (region != nullptr) return region;
  return refusal(bytes, errno, file.dma_buf);
}

absl::Status Device::refusal(size_t bytes, int error, bool dma_buf) const {
  const std::string what =
      absl::StrFormat("registering %.1f MiB with %s failed (%s)",
                      static_cast<double>(bytes) / (1 << 20), name_, strerror(error));
  if (error == ENOMEM && attributes_.max_mr > 0 && pinned_regions_ >= attributes_.max_mr) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "%s: this worker has all of the device's %d regions in use; register large ranges once, "
        "and take blocks from a MemoryPool",
        what, attributes_.max_mr));
  }
  if (dma_buf && error == ENOMEM) {  // nothing of the host's is pinned
    return absl::ResourceExhaustedError(absl::StrFormat(
        "%s: the window through which adapters reach the GPU's memory (BAR1, see `nvidia-smi -q -d "
        "MEMORY`) may be too small, or taken: register less of it, or turn on \"Above 4G "
        "decoding\" "
        "and Resizable BAR in the machine's firmware",
        what));
  }
  if (error == ENOMEM || error == EAGAIN) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "%s: this worker has %.1f MiB in %d regions registered there, and RLIMIT_MEMLOCK is %s; "
        "run `ulimit -l unlimited`, or set memlock in /etc/security/limits.conf or the container's "
        "ulimits",
        what, static_cast<double>(pinned_bytes_) / (1 << 20), pinned_regions_, memlock_limit()));
  }
  if (error == EFAULT) {
    return absl::InvalidArgumentError(absl::StrCat(
        what, ": the range is not mapped and writable in this process; register memory that is"));
  }
  return absl::UnavailableError(what);
}

absl::Status Device::dma_buf() const {
  if (api_.ibv_reg_dmabuf_mr == nullptr) {
    return absl::UnimplementedError(
        "no dma-buf: libibverbs lacks it; install rdma-core 34 or newer");
  }
  // No descriptor: a driver that knows dma-bufs complains of that, another of the call.
  ibv_mr* region = api_.ibv_reg_dmabuf_mr(pd_, 0, 4096, 0, -1, IBV_ACCESS_LOCAL_WRITE);
  const int error = errno;
  if (region != nullptr) api_.ibv_dereg_mr(region);
  if (region != nullptr || error == EBADF) return absl::OkStatus();
  return absl::UnimplementedError(
      absl::StrFormat("no dma-buf: the driver of %s lacks it (%s); use Linux 5.12 or newer and an "
                      "adapter whose driver supports it",
                      name_, strerror(error)));
}

absl::Status reaches_memory(const RegionEntry& region) {
  if (region.place.kind == MemoryKind::kHost || region.file.dma_buf || region.by_address) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      absl::StrFormat("verbs reaches device memory through a dma-buf or nvidia-peermem, and the "
                      "memory of %s has neither",
                      region.place.name()));
}

std::string Device::about_device_memory() const {
  std::map<std::pair<int, Way>, int> counts;
  for (const auto& [index, region] : on_devices_) ++counts[{region.device, region.way}];
  std::vector<std::string> texts;
  for (const auto& [what, count] : counts) {
    texts.push_back(absl::StrFormat("%d of CUDA device %d by %s", count, what.first,
                                    what.second == Way::kDmaBuf ? "dma-buf" : "nvidia-peermem"));
  }
  return absl::StrJoin(texts, ", ");
}

absl::Status Device::add_region(const RegionEntry& region, Way way) {
  int access = IBV_ACCESS_LOCAL_WRITE;
  if (allows(region.access, Access::kRemoteRead)) access |= IBV_ACCESS_REMOTE_READ;
  if (allows(region.access, Access::kRemoteWrite)) access |= IBV_ACCESS_REMOTE_WRITE;
  const int device = region.place.device;
  const internal::DeviceMemory* const devices = internal::device_memory();
  if (devices != nullptr && device >= 0) {
    const absl::StatusOr<bool> late = devices->wants_flush(device);
    if (!late.ok()) return late.status();
    if (*late && std::find(late_.begin(), late_.end(), device) == late_.end()) {
      late_.push_back(device);
    }
  }
  const bool by_address = region.place.kind != MemoryKind::kHost && way == Way::kAddress;
  if (by_address) {
    const absl::Status ready =
        devices == nullptr ? absl::UnimplementedError("built without CUDA support (link gpudirect)")
                           : devices->by_address(region.base, /*now=*/true);
    if (!ready.ok()) return ready;
  }
  auto registered =
      register_memory(region.base, region.size, access, by_address ? BackingFile{} : region.file);
  if (!registered.ok() && by_address) {
    return absl::Status(
        registered.status().code(),
        absl::StrCat(
            "no nvidia-peermem: it does not recognise the memory, or its window is too small: ",
            registered.status().message()));
  }
  if (!registered.ok()) return registered.status();
  if (device >= 0) on_devices_[region.index] = {device, way};
  if (regions_.size() <= region.index) regions_.resize(region.index + 1);
  regions_[region.index] = *registered;
  pinned_bytes_ += region.size;
  ++pinned_regions_;
  return absl::OkStatus();
}

absl::Status Device::show_devices() const {
  const internal::DeviceMemory* const devices = late_.empty() ? nullptr : internal::device_memory();
  if (devices == nullptr) return absl::OkStatus();
  for (const int device : late_) {
    if (absl::Status status = devices->flush(device); !status.ok()) return status;
  }
  return absl::OkStatus();
}

void Device::remove_region(uint32_t index) {
  ibv_mr* region = index < regions_.size() ? std::exchange(regions_[index], nullptr) : nullptr;
  if (region == nullptr) return;
  on_devices_.erase(index);
  pinned_bytes_ -= region->length;
  --pinned_regions_;
  api_.ibv_dereg_mr(region);
}

absl::StatusOr<ibv_mr*> Device::register_own(void* data, size_t bytes) const {
  return register_memory(data, bytes, IBV_ACCESS_LOCAL_WRITE);
}

bool Device::next_event(Event& event) const {
  ibv_async_event raw{};
  if (dead_ || api_.ibv_get_async_event(context_, &raw) != 0) return false;
  event = {.type = raw.event_type};
  switch (raw.event_type) {
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
    case IBV_EVENT_COMM_EST:
    case IBV_EVENT_SQ_DRAINED:
    case IBV_EVENT_PATH_MIG:
    case IBV_EVENT_PATH_MIG_ERR:
    case IBV_EVENT_QP_LAST_WQE_REACHED:
      event.queue_pair = raw.element.qp;
      break;
    case IBV_EVENT_CQ_ERR:
      event.completions = raw.element.cq;
      break;
    case IBV_EVENT_PORT_ACTIVE:
    case IBV_EVENT_PORT_ERR:
    case IBV_EVENT_LID_CHANGE:
    case IBV_EVENT_PKEY_CHANGE:
    case IBV_EVENT_SM_CHANGE:
    case IBV_EVENT_CLIENT_REREGISTER:
    case IBV_EVENT_GID_CHANGE:
      event.port = raw.element.port_num;
      break;
    default:
      break;
  }
  // At once: destroying a queue pair waits for the acknowledgement of its events.
  api_.ibv_ack_async_event(&raw);
  return true;
}

bool Device::next_completion_event() const {
  ibv_cq* queue = nullptr;
  void* context = nullptr;
  if (api_.ibv_get_cq_event(channel_, &queue, &context) != 0) return false;
  *static_cast<bool*>(context) = false;  // no longer armed
  api_.ibv_ack_cq_events(queue, 1);      // and only now may the queue go, and the flag with it
  return true;
}

namespace {

// True if the settings select this port of a device, or (port 0) any port of it.
bool wanted(const Tuning& tuning, const std::string& device, int port = 0) {
  if (tuning.devices.empty()) return true;
  return std::any_of(tuning.devices.begin(), tuning.devices.end(), [&](const std::string& name) {
    if (port == 0) return name.substr(0, name.find(':')) == device;
    return name == device || name == absl::StrCat(device, ":", port);
  });
}

void note(std::string& notes, std::string_view text) {
  absl::StrAppend(&notes, notes.empty() ? "" : "; ", std::string(text));
}

}  // namespace

absl::StatusOr<Devices> open_devices(const VerbsApi& api, const Tuning& tuning) {
  {
    // Before anything is registered; kernels from 5.12 on do not need it and say so. Workers may
    // start at once in several threads, and the library does not expect that here.
    static std::mutex one_at_a_time;
    const std::lock_guard lock(one_at_a_time);
    api.ibv_fork_init();
  }
  Devices found;
  std::vector<std::string> names, ports;
  int count = 0;
  ibv_device** list = api.ibv_get_device_list(&count);
  for (int i = 0; list != nullptr && i < count; ++i) {
    const std::string name = api.ibv_get_device_name(list[i]);
    names.push_back(name);
    if (!wanted(tuning, name)) continue;
    auto device = Device::open(api, list[i], tuning);
    if (!device.ok()) {
      note(found.notes, std::string(device.status().message()));
      ports.insert(ports.end(), tuning.devices.begin(), tuning.devices.end());
      continue;
    }
    bool used = false;
    for (uint8_t number = 1; number <= (*device)->attributes().phys_port_cnt; ++number) {
      ports.push_back(absl::StrCat(name, ":", number));
      if (!wanted(tuning, name, number) || found.ports.size() == kMaxPorts) continue;
      auto port = std::make_unique<Port>();
      port->device = device->get();
      port->number = number;
      port->index = static_cast<uint8_t>(found.ports.size());
      absl::Status status = (*device)->refresh(*port);
      if (status.ok() && !port->up() && tuning.devices.empty()) {
        status = absl::UnavailableError(absl::StrCat(
            port->name(), " is down: bring its network interface up (`ip link set ... up`)"));
      }
      if (status.ok() && port->up() && !port->infiniband()) {
        status = choose_gid(port->gids, tuning.gid_index, 0xff).status();
      }
      if (!status.ok()) {
        note(found.notes, absl::StrCat(port->name(), ": ", status.message()));
        continue;
      }
      used = true;
      found.ports.push_back(std::move(port));
    }
    if (used) found.devices.push_back(*std::move(device));
  }
  if (list != nullptr) api.ibv_free_device_list(list);
  for (const std::string& asked : tuning.devices) {
    const auto known = [&](const std::vector<std::string>& all) {
      return std::find(all.begin(), all.end(), asked) != all.end();
    };
    if (known(names) || known(ports)) continue;
    return absl::NotFoundError(
        absl::StrCat("there is no RDMA device or port \"", asked, "\" here: this machine has ",
                     names.empty() ? std::string("none") : absl::StrJoin(names, ", "),
                     "; `rdma link` lists them"));
  }
  if (found.ports.empty()) {
    if (names.empty()) {
      return absl::UnavailableError(
          "this machine has no RDMA device; to try without one: `modprobe rdma_rxe; rdma link add "
          "rxe0 type rxe netdev eth0`");
    }
    return absl::UnavailableError(absl::StrCat("no RDMA port can be used. ", found.notes));
  }
  return found;
}

}  // namespace baton::verbs
