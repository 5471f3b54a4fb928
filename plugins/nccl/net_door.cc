// The functions of the net door: what NCCL passes is looked at here, and what went wrong is said.
#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_format.h"
#include "plugins/nccl/net.h"
#include "plugins/nccl/numbers.h"

namespace baton::nccl {
namespace {

constinit Numbers<NetComm, 0, 1 << 16> comms;

// Requests: number of the comm, generation and index of the place.
constexpr int kNumberShift = 32, kGenerationShift = 16;

// A forked child has none of them: its parent's threads and memory are not its own.
[[maybe_unused]] const int without_comms = pthread_atfork(nullptr, nullptr, [] { comms.clear(); });

template <typename Comm>
Comm* comm_of(void* handle, bool sends) {
  NetComm* const comm = comms.find(handle);
  if (comm == nullptr || comm->sends != sends) return nullptr;
  return static_cast<Comm*>(comm);
}

// Why a comm can be used no more is told once.
Result broken(NetComm& comm, const char* call, const absl::Status& status) {
  if (!absl::IsInvalidArgument(status) && comm.said.exchange(true)) return result_of(status);
  return fail(call, status);
}

// Keeps what transfers need that had not ended when their comm was closed.
class ClosedComm final : public Remains {
 public:
  explicit ClosedComm(std::unique_ptr<NetComm> comm) : comm_(std::move(comm)) {}
  bool over() override { return comm_->open.load(std::memory_order_acquire) == 0; }

 private:
  const std::unique_ptr<NetComm> comm_;
};

void close(std::unique_ptr<NetComm> comm) {
  Hub& hub = comm->hub;
  comm->revoke();
  const bool quiet =
      hub.settle([&] { return comm->open.load(std::memory_order_acquire) == 0; }, kMostClosing);
  comm->tell_end();
  comm->remove_all();
  if (!quiet) hub.leave(std::make_unique<ClosedComm>(std::move(comm)));
}

absl::Status no_comm() {
  return absl::InvalidArgumentError(
      "not a comm of this direction that connect() or accept() gave to this process, or closed");
}

}  // namespace

bool net_door::enlist(NetComm& comm) {
  comm.number = static_cast<uint32_t>(comms.give(comm));
  return comm.number != 0;
}

void net_door::strike(NetComm& comm) { comms.end(comm.number, comm); }

void* net_door::handle_of(const NetComm& comm) { return as_handle(comm.number); }

void* net_door::request_of(const NetComm& comm, uint32_t index, uint16_t generation) {
  return as_handle(uintptr_t{comm.number} << kNumberShift |
                   uintptr_t{generation} << kGenerationShift | index);
}

Result net_door::register_memory(void* comm, void* data, size_t size, int type, uint64_t offset,
                                 int fd, void** memory) {
  NetComm* const to = comms.find(comm);
  if (to == nullptr || memory == nullptr) {
    return fail("regMr", no_comm());
  }
  *memory = nullptr;
  if ((type != kHostPointer && type != kCudaPointer) || size > kMostBytes ||
      (data == nullptr && size != 0)) {
    return fail("regMr", absl::InvalidArgumentError(absl::StrFormat(
                             "%u bytes at %p of type %d: types are host (1) and CUDA (2), sizes up "
                             "to 1 TiB",
                             size, data, type)));
  }
  const absl::StatusOr<void*> added = to->add(data, size, offset, fd);
  if (!added.ok()) return fail("regMr", added.status());
  *memory = *added;
  return Result::kSuccess;
}

Result net_door::deregister(void* comm, void* memory) {
  NetComm* const from = comms.find(comm);
  if (from == nullptr) return fail("deregMr", no_comm());
  if (memory == nullptr) return Result::kSuccess;
  const absl::Status status = from->remove(memory);
  return status.ok() ? Result::kSuccess : fail("deregMr", status);
}

Result net_door::send(void* comm, void* data, size_t size, int tag, void* memory, void** request) {
  auto* const to = comm_of<SendComm>(comm, true);
  if (to == nullptr || request == nullptr) return fail("isend", no_comm());
  *request = nullptr;
  const absl::Status status = to->send(data, size, tag, memory, request);
  return status.ok() ? Result::kSuccess : broken(*to, "isend", status);
}

Result net_door::receive(void* comm, int count, void** data, const size_t* sizes, const int* tags,
                         void** memory, bool polled, void** request) {
  auto* const to = comm_of<ReceiveComm>(comm, false);
  if (to == nullptr || request == nullptr) return fail("irecv", no_comm());
  *request = nullptr;
  const absl::Status status = to->receive(count, data, sizes, tags, memory, polled, request);
  return status.ok() ? Result::kSuccess : broken(*to, "irecv", status);
}

// A counter rises when all bytes can be seen, by a device too (gpudirect/flush_policy.h).
Result net_door::flush(void* comm, int count, const int* sizes, void** memory, void** request) {
  if (request != nullptr) *request = nullptr;
  auto* const of = comm_of<ReceiveComm>(comm, false);
  if (of == nullptr) return fail("iflush", no_comm());
  for (int i = 0; i < count; ++i) {
    if (sizes[i] == 0 || of->memory(memory[i]) != nullptr) continue;
    return fail("iflush", absl::InvalidArgumentError("memory that is not registered here"));
  }
  return Result::kSuccess;
}

Result net_door::test(void* request, int* done, int* sizes) {
  const auto bits = reinterpret_cast<uintptr_t>(request);
  NetComm* const comm = comms.find(bits >> kNumberShift);
  if (comm == nullptr || done == nullptr) {
    return fail("test", absl::InvalidArgumentError("not a request, or its comm is closed"));
  }
  *done = 0;
  const auto index = static_cast<uint32_t>(bits & 0xffff);
  const auto generation = static_cast<uint16_t>(bits >> kGenerationShift);
  const absl::StatusOr<bool> over =
      comm->sends ? static_cast<SendComm*>(comm)->test(index, generation, sizes)
                  : static_cast<ReceiveComm*>(comm)->test(index, generation, sizes);
  if (!over.ok()) return broken(*comm, "test", over.status());
  *done = *over ? 1 : 0;
  return Result::kSuccess;
}

Result net_door::close_send(void* comm) {
  auto* const gone = comm_of<SendComm>(comm, true);
  if (gone == nullptr || comms.take(comm) != gone) return fail("closeSend", no_comm());
  close(std::unique_ptr<NetComm>(gone));
  return Result::kSuccess;
}

Result net_door::close_receive(void* comm) {
  auto* const gone = comm_of<ReceiveComm>(comm, false);
  if (gone == nullptr || comms.take(comm) != gone) return fail("closeRecv", no_comm());
  close(std::unique_ptr<NetComm>(gone));
  return Result::kSuccess;
}

// A comm's registered memory, and what went wrong with the comm.

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
