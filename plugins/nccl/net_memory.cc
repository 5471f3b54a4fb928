// A comm's registered memory, and what went wrong with the comm.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_format.h"
#include "plugins/nccl/net.h"
#include "plugins/nccl/numbers.h"

namespace baton::nccl {
namespace {

constinit Numbers<NetMemory, 1 << 20, 1 << 18> memories;

absl::Status forget(Worker& worker, NetMemory& memory) {
  const absl::Status status =
      memory.region.generation == 0 ? absl::OkStatus() : worker.deregister_memory(memory.region);
  if (absl::IsFailedPrecondition(status)) return status;  // still in use by transfers of ours
  if (memory.fd >= 0) ::close(memory.fd);
  memory.fd = -1;
  return status;
}

}  // namespace

NetComm::~NetComm() {
  net_door::strike(*this);
  remove_all();
  hub.worker().free_counter(ended).IgnoreError();
}

absl::StatusOr<void*> NetComm::add(void* data, size_t size, uint64_t offset, int fd) {
  const std::lock_guard lock(memory_mutex_);
  std::unique_ptr<NetMemory>& memory = memory_[{data, size, fd < 0 ? 0 : offset + 1}];
  if (memory != nullptr) {
    ++memory->users;
    return as_handle(memory->number);
  }
  auto made = std::make_unique<NetMemory>();
  made->comm = this;
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
  if (status.ok() && (made->number = memories.give(*made)) == 0) {
    status = absl::ResourceExhaustedError("too many registrations: deregister some");
  }
  if (!status.ok()) {
    forget(hub.worker(), *made).IgnoreError();
    memory_.erase({data, size, fd < 0 ? 0 : offset + 1});
    return status;
  }
  made->users = 1;
  memory = std::move(made);
  return as_handle(memory->number);
}

const NetMemory* NetComm::memory(const void* handle) const {
  const NetMemory* const found = memories.find(handle);
  return found != nullptr && found->comm == this ? found : nullptr;
}

absl::Status NetComm::remove(const void* handle) {
  const std::lock_guard lock(memory_mutex_);
  const auto found = std::find_if(memory_.begin(), memory_.end(), [&](const auto& entry) {
    return as_handle(entry.second->number) == handle;
  });
  if (found == memory_.end()) {
    return absl::InvalidArgumentError("not memory that is registered with this comm");
  }
  NetMemory* const memory = found->second.get();
  if (--memory->users > 0) return absl::OkStatus();
  memories.take(memory->number);
  // An abort: what is under way ends first, within NCCL's patience.
  if (sends) {
    auto& self = static_cast<SendComm&>(*this);
    self.cancel(memory);
    hub.settle([&] { return !self.reads(memory); }, kMostClosing);
  }
  const absl::Status status = forget(hub.worker(), *memory);
  const bool used = absl::IsFailedPrecondition(status);
  if (used) left_.push_back(std::move(found->second));  // remove_all() tries again
  memory_.erase(found);
  if (used) return absl::OkStatus();
  // The region is gone, and the text says what may still touch the memory.
  return absl::IsUnavailable(status) ? absl::OkStatus() : status;
}

void NetComm::remove_all() {
  const std::lock_guard lock(memory_mutex_);
  for (auto& [key, memory] : memory_) {
    memories.take(memory->number);
    left_.push_back(std::move(memory));
  }
  memory_.clear();
  // Memory that our transfers still use is tried again when they have ended.
  std::erase_if(left_, [this](auto& memory) {
    return !absl::IsFailedPrecondition(forget(hub.worker(), *memory));
  });
}

absl::StatusOr<NetComm::Place> NetComm::place_of(const void* handle, const void* data,
                                                 size_t bytes) const {
  if (bytes == 0) return Place{};
  const NetMemory* const memory = this->memory(handle);
  if (memory == nullptr) {
    return absl::InvalidArgumentError(
        "bytes without memory that is registered with this comm: call regMr() first");
  }
  const auto offset = static_cast<size_t>(static_cast<const std::byte*>(data) - memory->data);
  if (offset > memory->size || bytes > memory->size - offset) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%u bytes at %p do not lie in the %u that were registered at %p", bytes,
                        data, memory->size, memory->data));
  }
  return Place{memory, offset};
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
