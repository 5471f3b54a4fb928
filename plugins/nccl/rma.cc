// The RMA door: from what NCCL calls to accesses of windows.
#include "plugins/nccl/rma.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "collectives/endpoint.h"
#include "plugins/nccl/plugin.h"

namespace baton::nccl {

extern "C" const NetV12 ncclNetPlugin_v12;  // whose devices are this door's too

namespace rma {
namespace {

constexpr uint32_t kMagic = 0x42524d31;

// What listen() writes into NCCL's handle.
struct RmaHandle {
  uint32_t magic = kMagic;
  uint32_t unused = 0;
  uint64_t number = 0;  // of the listener, in its process
  std::array<char, Handle::kBytes> endpoint{};
};
static_assert(sizeof(RmaHandle) <= kHandleBytes);

// One for each communicator of NCCL's, which is one rank. Ranks of one communicator that share this
// process need an endpoint each; all others share them.
struct RmaDoor {
  uint64_t communicator = 0;
  size_t place = 0;  // among the ranks of that communicator here
};
struct RmaListener {
  std::shared_ptr<Endpoint> endpoint;
  RmaHandle handle;
};
struct RmaDoors {
  std::mutex mutex;
  std::vector<RmaDoor*> open;
  struct Shared {
    int device;
    size_t place;
    std::weak_ptr<Endpoint> endpoint;
  };
  std::vector<Shared> endpoints;
  std::atomic<uint64_t> listeners{1};
};
RmaDoors& doors() {
  static auto* const all = new RmaDoors;  // outlives what NCCL leaves open at exit
  return *all;
}

// What NCCL has of one kind: what it gives back twice is an error and no crash.
template <typename T>
struct Given {
  std::mutex mutex;
  std::set<void*> all;
  static Given& get() {
    static auto* const given = new Given;
    return *given;
  }
  static Result give(T* made, void** out) {
    std::lock_guard lock(get().mutex);
    get().all.insert(*out = made);
    return Result::kSuccess;
  }
  static Result take_back(const char* what, void* pointer) {
    {
      std::lock_guard lock(get().mutex);
      if (pointer != nullptr && get().all.erase(pointer) == 0) {
        return fail(what,
                    absl::InvalidArgumentError("it is not one of this door's, or gone already"));
      }
    }
    delete static_cast<T*>(pointer);
    return Result::kSuccess;
  }
};

absl::StatusOr<std::shared_ptr<Endpoint>> endpoint_for(int device, size_t place) {
  std::lock_guard lock(doors().mutex);
  std::erase_if(doors().endpoints, [](const auto& one) { return one.endpoint.expired(); });
  for (const RmaDoors::Shared& one : doors().endpoints) {
    if (one.device != device || one.place != place) continue;
    if (auto endpoint = one.endpoint.lock()) return endpoint;
  }
  absl::StatusOr<WorkerOptions> options = Plugin::get().worker_options(device);
  if (!options.ok()) return options.status();
  auto endpoint = Endpoint::open({.worker = *std::move(options)});
  if (endpoint.ok()) doors().endpoints.push_back({device, place, *endpoint});
  return endpoint;
}

// Equal at all ranks, and never of two groups: each listener has a number of its own.
uint64_t group_of(absl::Span<const RmaHandle> handles) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const RmaHandle& handle : handles) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(&handle);
    for (size_t i = 0; i < sizeof handle; ++i) hash = (hash ^ bytes[i]) * 0x100000001b3;
  }
  return hash == 0 ? 1 : hash;
}

absl::Status missing(const char* what) {
  return absl::InvalidArgumentError(absl::StrCat(what, " is NULL"));
}

absl::StatusOr<std::byte*> local_of(const RmaAccess& access) {
  if (access.size == 0) return nullptr;
  if (access.local == nullptr) return missing("the local memory handle");
  const Window& window = *access.local->window;
  if (access.size > window.bytes() || access.local_offset > window.bytes() - access.size) {
    return absl::InvalidArgumentError(absl::StrFormat("%u bytes at %u of local memory with %u",
                                                      access.size, access.local_offset,
                                                      window.bytes()));
  }
  return window.data() + access.local_offset;
}

void on_end(void* context, Work, const absl::Status& status) {
  auto& request = *static_cast<RmaRequest*>(context);
  request.result = status;
  request.done.store(true, std::memory_order_release);
}

// Makes `start(options)` an access of the context's, and its request.
template <typename Start>
absl::Status begin(const RmaContext& context, int number, uint32_t flags, void** request,
                   Start&& start) {
  if (number < 0 || number >= context.count) {
    return absl::InvalidArgumentError(
        absl::StrFormat("there is no context %d: there are %d", number, context.count));
  }
  RmaComm& comm = *context.comm;
  RmaRequest* const made = comm.take();
  CallOptions options;
  options.tag = context.first_tag + number;
  options.more = (flags & kAggregate) != 0;
  options.detached = true;
  options.on_end = &on_end;
  options.context = made;
  absl::StatusOr<Work> work;
  while (absl::IsResourceExhausted((work = start(options)).status())) comm.comm().progress();
  if (!work.ok()) {
    comm.give_back(made);
    return work.status();
  }
  *request = made;
  return absl::OkStatus();
}

absl::Status put_plain(const RmaContext& context, const RmaAccess& access, void** request) {
  const absl::StatusOr<std::byte*> local = local_of(access);
  if (!local.ok()) return local.status();
  if (access.remote == nullptr) return missing("the remote memory handle");
  return begin(context, access.number, access.flags, request, [&](const CallOptions& options) {
    return access.remote->window->put(*local, access.size, static_cast<int>(access.rank),
                                      access.remote_offset, options);
  });
}

absl::Status put_and_signal(const RmaContext& context, const RmaAccess& access, void** request) {
  if (access.operation != kSignalInc && access.operation != kSignalAdd) {
    return absl::InvalidArgumentError(
        absl::StrFormat("there is no signal operation %u", access.operation));
  }
  const absl::StatusOr<std::byte*> local = local_of(access);
  if (!local.ok()) return local.status();
  if (access.words == nullptr) return missing("the memory handle of the signal");
  if (access.size > 0 && access.remote == nullptr) return missing("the remote memory handle");
  const WindowWord word{.window = *access.words->window,
                        .offset = access.word_offset,
                        .add = access.operation == kSignalInc ? 1 : access.value,
                        .behind_earlier_puts = access.strong};
  const RmaMemory& target = access.size == 0 ? *access.words : *access.remote;
  const uint64_t offset = access.size == 0 ? 0 : access.remote_offset;
  return begin(context, access.number, access.flags, request, [&](const CallOptions& options) {
    return target.window->put_add(*local, access.size, static_cast<int>(access.rank), offset, word,
                                  options);
  });
}

absl::Status get_plain(const RmaContext& context, const RmaAccess& access, void** request) {
  const absl::StatusOr<std::byte*> local = local_of(access);
  if (!local.ok()) return local.status();
  if (access.remote == nullptr) return missing("the remote memory handle");
  return begin(context, access.number, access.flags, request, [&](const CallOptions& options) {
    return access.remote->window->get(*local, access.size, static_cast<int>(access.rank),
                                      access.remote_offset, options);
  });
}

absl::Status flush_to(const RmaContext& context, int number, RmaMemory* memory, uint32_t rank,
                      void** request) {
  if (memory == nullptr) memory = context.comm->any_memory();
  if (memory == nullptr) return missing("the memory handle");
  return begin(context, number, 0, request, [&](const CallOptions& options) {
    return memory->window->flush(static_cast<int>(rank), options);
  });
}

// Runs one of the four above, where its arguments are there.
template <typename Body>
Result start(const char* what, void* context, void** request, Body&& body) {
  if (context == nullptr) return fail(what, missing("the context"));
  if (request == nullptr) return fail(what, missing("the request"));
  *request = nullptr;
  const absl::Status status = body(*static_cast<RmaContext*>(context));
  return status.ok() ? Result::kSuccess : fail(what, status);
}

absl::StatusOr<RmaComm*> join(const RmaListener& listener, absl::Span<const RmaHandle> handles,
                              int rank) {
  const RmaHandle& own = handles[static_cast<size_t>(rank)];
  if (std::memcmp(&own, &listener.handle, sizeof own) != 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("handle %d is not what listen() has made for this rank", rank));
  }
  std::vector<Handle> members;
  for (size_t i = 0; i < handles.size(); ++i) {
    absl::StatusOr<Handle> member =
        handles[i].magic == kMagic
            ? Handle::decode({handles[i].endpoint.data(), handles[i].endpoint.size()})
            : absl::InvalidArgumentError("it was made by another plugin: use the same everywhere");
    if (!member.ok()) {
      return absl::Status(member.status().code(),
                          absl::StrCat("the handle of rank ", i, ": ", member.status().message()));
    }
    members.push_back(*member);
  }
  GroupOptions options;
  options.uuid = group_of(handles);
  options.name = "nccl rma";
  options.tune = false;
  auto comm = Communicator::create(listener.endpoint, members, options);
  if (!comm.ok()) return comm.status();
  if (absl::Status ready = (*comm)->wait_ready(options.start_timeout); !ready.ok()) return ready;
  return new RmaComm(*std::move(comm));
}

}  // namespace
}  // namespace rma

// --- comms ---------------------------------------------------------------------------------------

RmaMemory::~RmaMemory() {
  window.reset();
  if (fd >= 0) ::close(fd);
}

RmaMemory* RmaComm::keep(std::unique_ptr<RmaMemory> memory) {
  std::lock_guard lock(mutex_);
  memory_.push_back(std::move(memory));
  return memory_.back().get();
}

bool RmaComm::drop(RmaMemory* memory) {
  std::unique_ptr<RmaMemory> dropped;  // destroyed without the lock: it waits for accesses
  std::lock_guard lock(mutex_);
  const auto found = std::find_if(memory_.begin(), memory_.end(),
                                  [&](const auto& one) { return one.get() == memory; });
  if (found == memory_.end()) return false;
  dropped = std::move(*found);
  memory_.erase(found);
  return true;
}

RmaMemory* RmaComm::any_memory() {
  std::lock_guard lock(mutex_);
  return memory_.empty() ? nullptr : memory_.front().get();
}

RmaRequest* RmaComm::take() {
  std::lock_guard lock(mutex_);
  if (free_.empty()) free_.push_back(&requests_.emplace_back());
  RmaRequest* const request = free_.back();
  free_.pop_back();
  request->open.store(true, std::memory_order_relaxed);
  request->done.store(false, std::memory_order_relaxed);
  request->result = absl::OkStatus();
  return request;
}

void RmaComm::give_back(RmaRequest* request) {
  std::lock_guard lock(mutex_);
  if (request->open.exchange(false)) free_.push_back(request);
}

// --- what NCCL calls -----------------------------------------------------------------------------

namespace rma {

Result init(void** context, uint64_t communicator, Logger log) {
  if (context == nullptr) return fail("RMA init", missing("the context"));
  if (absl::Status status = Plugin::get().open(log); !status.ok()) return fail("RMA init", status);
  auto door = std::make_unique<RmaDoor>();
  door->communicator = communicator;
  std::lock_guard lock(doors().mutex);
  const auto taken = [&](const RmaDoor* other) {
    return other->communicator == communicator && other->place == door->place;
  };
  while (std::any_of(doors().open.begin(), doors().open.end(), taken)) ++door->place;
  doors().open.push_back(door.get());
  *context = door.release();
  return Result::kSuccess;
}

Result finalize(void* context) {
  auto* const door = static_cast<RmaDoor*>(context);
  std::lock_guard lock(doors().mutex);
  if (std::erase(doors().open, door) == 0) return Result::kSuccess;  // NULL, or a second time
  delete door;
  return Result::kSuccess;
}

Result devices(int* count) {
  if (count == nullptr) return fail("RMA devices", missing("the count"));
  *count = static_cast<int>(Plugin::get().devices().size());
  return Result::kSuccess;
}

Result properties(int device, int device_type, PropertiesV12* out) {
  if (out == nullptr) return fail("RMA properties", missing("the struct"));
  const Result result = ncclNetPlugin_v12.properties(device, out);
  if (result == Result::kSuccess) out->device_type = device_type;
  return result;
}

Result listen(void* context, int device, void* handle, void** listener) {
  if (context == nullptr || handle == nullptr || listener == nullptr) {
    return fail("RMA listen", missing("the context, the handle or the comm"));
  }
  auto endpoint = endpoint_for(device, static_cast<RmaDoor*>(context)->place);
  if (!endpoint.ok()) return fail("RMA listen", endpoint.status());
  auto made = std::make_unique<RmaListener>();
  made->endpoint = *std::move(endpoint);
  made->handle.number = doors().listeners++;
  made->endpoint->handle().bytes().copy(made->handle.endpoint.data(), Handle::kBytes);
  std::memset(handle, 0, kHandleBytes);
  std::memcpy(handle, &made->handle, sizeof made->handle);
  return Given<RmaListener>::give(made.release(), listener);
}

// The context is not looked at: NCCL 2.31 passes its net's.
Result connect(void*, void* handles[], int ranks, int rank, void* listener, void** comm) {
  if (handles == nullptr || listener == nullptr || comm == nullptr) {
    return fail("RMA connect", missing("the list of handles, the listener or the comm"));
  }
  if (ranks < 1 || rank < 0 || rank >= ranks) {
    return fail("RMA connect",
                absl::InvalidArgumentError(absl::StrFormat("rank %d of %d", rank, ranks)));
  }
  std::vector<RmaHandle> all(static_cast<size_t>(ranks));
  for (size_t i = 0; i < all.size(); ++i) {
    if (handles[i] == nullptr) return fail("RMA connect", missing("a handle"));
    std::memcpy(&all[i], handles[i], sizeof all[i]);
  }
  const absl::StatusOr<RmaComm*> made = join(*static_cast<RmaListener*>(listener), all, rank);
  if (!made.ok()) return fail("RMA connect", made.status());
  return Given<RmaComm>::give(*made, comm);
}

Result create_context(void* comm, int contexts, void** context) {
  if (comm == nullptr || context == nullptr) {
    return fail("RMA context", missing("the comm or the context"));
  }
  if (contexts < 1) {
    return fail("RMA context",
                absl::InvalidArgumentError(absl::StrFormat("%d contexts", contexts)));
  }
  auto& of = *static_cast<RmaComm*>(comm);
  return Given<RmaContext>::give(new RmaContext{&of, of.take_tags(contexts), contexts}, context);
}

Result register_memory(void* comm, void* data, size_t size, int type, int fd, uint64_t offset,
                       void** memory) {
  constexpr const char* kWhat = "RMA registration";
  if (comm == nullptr || memory == nullptr) return fail(kWhat, missing("the comm or the handle"));
  if (type != kHostPointer && type != kCudaPointer) {
    return fail(kWhat, absl::InvalidArgumentError(absl::StrFormat("memory of type %d", type)));
  }
  auto& of = *static_cast<RmaComm*>(comm);
  auto made = std::make_unique<RmaMemory>();
  WindowOptions options{.signals = 0, .words = true};
  if (fd >= 0) {
    made->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    options.file = {.fd = made->fd, .offset = offset, .dma_buf = true};
  }
  auto window = Window::create(of.comm(), data, size, options);
  if (!window.ok()) return fail(kWhat, window.status());
  made->window = *std::move(window);
  *memory = of.keep(std::move(made));
  return Result::kSuccess;
}

Result deregister(void* comm, void* memory) {
  if (comm == nullptr) return fail("RMA deregistration", missing("the comm"));
  if (memory == nullptr || static_cast<RmaComm*>(comm)->drop(static_cast<RmaMemory*>(memory))) {
    return Result::kSuccess;
  }
  return fail("RMA deregistration",
              absl::InvalidArgumentError("the handle is not one of this comm's, or gone already"));
}

Result destroy_context(void* context) {
  return Given<RmaContext>::take_back("RMA context's end", context);
}
Result close_comm(void* comm) { return Given<RmaComm>::take_back("RMA close", comm); }
Result close_listen(void* listener) {
  return Given<RmaListener>::take_back("RMA close of a listener", listener);
}

Result put(void* context, const RmaAccess& access, void** request) {
  return start("RMA put", context, request,
               [&](const RmaContext& of) { return put_plain(of, access, request); });
}
Result put_signal(void* context, const RmaAccess& access, void** request) {
  return start("RMA put with signal", context, request,
               [&](const RmaContext& of) { return put_and_signal(of, access, request); });
}
Result get(void* context, const RmaAccess& access, void** request) {
  return start("RMA get", context, request,
               [&](const RmaContext& of) { return get_plain(of, access, request); });
}
Result flush(void* context, int number, void* memory, uint32_t rank, void** request) {
  return start("RMA flush", context, request, [&](const RmaContext& of) {
    return flush_to(of, number, static_cast<RmaMemory*>(memory), rank, request);
  });
}

Result test(void* comm, void* request, int* done) {
  if (comm == nullptr || request == nullptr || done == nullptr) {
    return fail("RMA test", missing("the comm, the request or the answer"));
  }
  auto& of = *static_cast<RmaComm*>(comm);
  auto& tested = *static_cast<RmaRequest*>(request);
  *done = 0;
  if (!tested.open.load(std::memory_order_relaxed)) {
    return fail("RMA test", absl::InvalidArgumentError("the request is done already"));
  }
  if (!tested.done.load(std::memory_order_acquire)) {
    of.comm().progress();
    if (!tested.done.load(std::memory_order_acquire)) return Result::kSuccess;
  }
  const absl::Status result = std::move(tested.result);
  of.give_back(&tested);
  *done = 1;
  return result.ok() ? Result::kSuccess : fail("RMA", result);
}

Result progress(void* context) {
  if (context == nullptr) return fail("RMA progress", missing("the context"));
  Communicator& comm = static_cast<RmaContext*>(context)->comm->comm();
  comm.progress();
  const absl::Status status = comm.status();
  return status.ok() ? Result::kSuccess : fail("RMA", status);
}

Result query_last_error(void* context, bool* failed) {
  if (context == nullptr || failed == nullptr) {
    return fail("RMA error query", missing("the context or the answer"));
  }
  *failed = !static_cast<RmaContext*>(context)->comm->comm().status().ok();
  return Result::kSuccess;
}

}  // namespace rma
}  // namespace baton::nccl
