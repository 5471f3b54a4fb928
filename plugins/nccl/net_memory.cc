// A comm's registered memory, and what went wrong with the comm.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_format.h"
#include "plugins/nccl/net.h"

namespace baton::nccl {
NetComm::~NetComm() {
  net_door::strike(*this);
  remove_all();
  hub.worker().free_counter(ended).IgnoreError();
}

absl::StatusOr<NetMemory*> NetComm::add(void* data, size_t size, uint64_t offset, int fd) {
  const std::lock_guard lock(memory_mutex_);
  std::unique_ptr<NetMemory>& memory = memory_[{data, size, fd < 0 ? 0 : offset + 1}];
  if (memory != nullptr) {
    ++memory->users;
    return memory.get();
  }
  auto made = std::make_unique<NetMemory>();
  made->data = static_cast<std::byte*>(data);
  made->size = size;
  absl::Status status;
  BackingFile file;
  if (fd >= 0) {  // NCCL closes its descriptor behind this call
    made->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    file = {.fd = made->fd, .offset = offset, .dma_buf = true};
    if (made->fd < 0) status = absl::InvalidArgumentError("the dma-buf's descriptor is not open");
  }
  if (status.ok() && size != 0) {
    const auto region = hub.worker().register_memory(
        data, size, sends ? Access::kLocal : Access::kRemoteWrite, file);
    status = region.status();
    if (region.ok()) made->region = *region;
  }
  if (status.ok() && size != 0 && !sends) {
    const auto remote = hub.worker().remote_region(made->region);
    status = remote.status();
    if (remote.ok()) made->remote = *remote;
  }
  if (!status.ok()) {
    if (made->fd >= 0) ::close(made->fd);
    memory_.erase({data, size, fd < 0 ? 0 : offset + 1});
    return status;
  }
  made->users = 1;
  memory = std::move(made);
  return memory.get();
}

namespace {

absl::Status forget(Worker& worker, NetMemory& memory) {
  const absl::Status status =
      memory.region.generation == 0 ? absl::OkStatus() : worker.deregister_memory(memory.region);
  if (absl::IsFailedPrecondition(status)) return status;  // still in use by transfers of ours
  if (memory.fd >= 0) ::close(memory.fd);
  memory.fd = -1;
  return status;
}

}  // namespace

absl::Status NetComm::remove(NetMemory* memory) {
  const std::lock_guard lock(memory_mutex_);
  const auto found = std::find_if(memory_.begin(), memory_.end(),
                                  [&](const auto& entry) { return entry.second.get() == memory; });
  if (found == memory_.end()) {
    return absl::InvalidArgumentError("not memory that is registered with this comm");
  }
  if (--memory->users > 0) return absl::OkStatus();
  // An abort: what is under way ends first, within NCCL's patience.
  if (sends) {
    auto& self = static_cast<SendComm&>(*this);
    self.cancel(memory);
    hub.settle([&] { return !self.reads(memory); }, kMostClosing);
  }
  absl::Status status = forget(hub.worker(), *memory);
  if (absl::IsFailedPrecondition(status)) {
    memory->users = 1;  // remove_all() tries again
    return absl::OkStatus();
  }
  memory_.erase(found);
  // The region is gone, and the text says what may still touch the memory.
  return absl::IsUnavailable(status) ? absl::OkStatus() : status;
}

void NetComm::remove_all() {
  const std::lock_guard lock(memory_mutex_);
  // What transfers of ours still use is tried again when they have ended.
  std::erase_if(memory_, [this](auto& entry) {
    return !absl::IsFailedPrecondition(forget(hub.worker(), *entry.second));
  });
}

absl::StatusOr<size_t> NetComm::offset_in(const NetMemory* memory, const void* data, size_t bytes) {
  if (bytes == 0) return size_t{0};
  if (memory == nullptr) {
    return absl::InvalidArgumentError("bytes without registered memory: call regMr() first");
  }
  const auto offset = static_cast<size_t>(static_cast<const std::byte*>(data) - memory->data);
  if (offset > memory->size || bytes > memory->size - offset) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%u bytes at %p do not lie in the %u that were registered at %p", bytes,
                        data, memory->size, memory->data));
  }
  return offset;
}

absl::Status NetComm::status() {
  if (absl::Status gone = hub.status(*peer); !gone.ok() && !failed.load()) return gone;
  const std::lock_guard lock(mutex_);
  if (!why_.ok()) return why_;
  if (hub.worker().counter_value(ended) == 0) return absl::OkStatus();
  return absl::UnavailableError(
      sends ? "the receiver has closed its side, or failed: its log says why"
            : "the sender has closed its side, or failed: its log says why");
}

void NetComm::fail(const absl::Status& why) {
  {
    const std::lock_guard lock(mutex_);
    if (why_.ok()) {
      why_ = absl::IsNotFound(why)
                 ? absl::UnavailableError("the other side has taken its memory back: " +
                                          std::string(why.message()))
                 : why;
    }
  }
  failed.store(true, std::memory_order_release);
  tell_end();
}

void NetComm::tell_end() {
  if (told.exchange(true) || their_end.generation == 0) return;
  hub.worker()
      .submit({.peer = peer->id, .counter = their_end, .detached = true})
      .IgnoreError();  // a peer that is gone knows
}

}  // namespace baton::nccl
