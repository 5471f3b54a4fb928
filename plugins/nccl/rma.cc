// The RMA door: from what NCCL calls to accesses of windows.
#include "plugins/nccl/rma.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "collectives/endpoint.h"
#include "plugins/nccl/numbers.h"
#include "plugins/nccl/plugin.h"

namespace baton::nccl {

extern "C" const NetV12 ncclNetPlugin_v12;  // whose devices are this door's too

namespace {

constinit Numbers<RmaComm, 2 << 20, 1 << 12> rma_comms;
constinit Numbers<RmaMemory, 3 << 20, 1 << 18> rma_memories;
constinit Numbers<RmaContext, 4 << 20, 1 << 12> rma_contexts;

// Requests: number of the comm in its table, generation and index.
constexpr int kIndexBits = 20, kGenerationBits = 28;
constexpr uint32_t kGenerations = 1 << kGenerationBits;

absl::Status not_ours(const char* what) {
  return absl::InvalidArgumentError(
      absl::StrCat(what, " is not one of this door's, of another comm, or gone already"));
}
absl::Status too_many() {
  return absl::ResourceExhaustedError("this process has too many of them open: close some");
}

}  // namespace

namespace rma {
namespace {

constexpr uint32_t kMagic = 0x42524d31;

// The contents of NCCL's handle, written by listen().
struct RmaHandle {
  uint32_t magic = kMagic;
  uint32_t unused = 0;
  uint64_t number = 0;  // of the listener, in its process
  std::array<char, Handle::kBytes> endpoint{};
};
static_assert(sizeof(RmaHandle) <= kHandleBytes);

// NCCL's context of a communicator, which is one rank. Ranks of one communicator that share this
// process need an endpoint each; ranks of other communicators reuse those endpoints.
struct RmaDoor {
  uint64_t communicator = 0;
  size_t place = 0;  // among the ranks of that communicator here
};
struct RmaListener {
  std::shared_ptr<Endpoint> endpoint;
  RmaHandle handle;
};
constinit Numbers<RmaListener, 5 << 20, 1 << 12> listeners;
struct RmaDoors {
  std::mutex mutex;
  std::vector<RmaDoor*> open;
  struct Shared {
    int device;
    size_t place;
    std::weak_ptr<Endpoint> endpoint;
  };
  std::vector<Shared> endpoints;
  std::atomic<uint64_t> next_listener{1};
};
RmaDoors& doors() {
  static auto* const all = new RmaDoors;  // outlives what NCCL leaves open at exit
  return *all;
}

// Gives NCCL what was made, under a number of its kind.
template <typename T, typename Table>
Result give(const char* what, Table& table, std::unique_ptr<T> made, void** out) {
  *out = as_handle(table.give(*made));
  if (*out == nullptr) return fail(what, too_many());
  made.release();
  return Result::kSuccess;
}
// And takes it back. NULL is as good as nothing.
template <typename Table>
Result take_back(const char* what, Table& table, void* handle) {
  auto* const taken = table.take(handle);
  if (taken == nullptr && handle != nullptr) return fail(what, not_ours("it"));
  delete taken;
  return Result::kSuccess;
}

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

absl::StatusOr<size_t> place_of(void* context) {
  std::lock_guard lock(doors().mutex);
  const auto& open = doors().open;
  const auto door = std::find(open.begin(), open.end(), context);
  if (door == open.end()) return not_ours("the context");
  return (*door)->place;
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

absl::StatusOr<std::byte*> local_of(const RmaComm& comm, const RmaAccess& access) {
  if (access.size == 0) return nullptr;
  const auto local = comm.memory(access.local, "the local memory handle");
  if (!local.ok()) return local.status();
  const Window& window = *(*local)->window;
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
absl::Status begin(RmaComm& comm, const RmaContext& context, int number, uint32_t flags,
                   void** request, Start&& start) {
  if (number < 0 || number >= context.count) {
    return absl::InvalidArgumentError(
        absl::StrFormat("there is no context %d: there are %d", number, context.count));
  }
  RmaRequest* const made = comm.take();
  if (made == nullptr) {
    return absl::ResourceExhaustedError("a million requests are not tested: test some");
  }
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
  *request = comm.handle_of(*made);
  return absl::OkStatus();
}

constexpr const char* kRemote = "the remote memory handle";

// A put, or a get, without a signal.
absl::Status plain(RmaComm& comm, const RmaContext& context, const RmaAccess& access, bool put,
                   void** request) {
  const absl::StatusOr<std::byte*> local = local_of(comm, access);
  if (!local.ok()) return local.status();
  const auto remote = comm.memory(access.remote, kRemote);
  if (!remote.ok()) return remote.status();
  return begin(comm, context, access.number, access.flags, request,
               [&](const CallOptions& options) {
                 Window& window = *(*remote)->window;
                 const int rank = static_cast<int>(access.rank);
                 return put ? window.put(*local, access.size, rank, access.remote_offset, options)
                            : window.get(*local, access.size, rank, access.remote_offset, options);
               });
}

absl::Status put_and_signal(RmaComm& comm, const RmaContext& context, const RmaAccess& access,
                            void** request) {
  if (access.operation != kSignalInc && access.operation != kSignalAdd) {
    return absl::InvalidArgumentError(
        absl::StrFormat("there is no signal operation %u", access.operation));
  }
  const absl::StatusOr<std::byte*> local = local_of(comm, access);
  if (!local.ok()) return local.status();
  const auto words = comm.memory(access.words, "the memory handle of the signal");
  if (!words.ok()) return words.status();
  const auto target = access.size == 0 ? words : comm.memory(access.remote, kRemote);
  if (!target.ok()) return target.status();
  const WindowWord word{.window = *(*words)->window,
                        .offset = access.word_offset,
                        .add = access.operation == kSignalInc ? 1 : access.value,
                        .behind_earlier_puts = access.strong};
  const uint64_t offset = access.size == 0 ? 0 : access.remote_offset;
  return begin(comm, context, access.number, access.flags, request,
               [&](const CallOptions& options) {
                 return (*target)->window->put_add(
                     *local, access.size, static_cast<int>(access.rank), offset, word, options);
               });
}

absl::Status flush_to(RmaComm& comm, const RmaContext& context, int number, void* handle,
                      uint32_t rank, void** request) {
  const RmaMemory* const any = handle == nullptr ? comm.any_memory() : nullptr;
  const auto memory = any == nullptr ? comm.memory(handle, "the memory handle") : any;
  if (!memory.ok()) return memory.status();
  return begin(comm, context, number, 0, request, [&](const CallOptions& options) {
    return (*memory)->window->flush(static_cast<int>(rank), options);
  });
}

// body(comm, context)
template <typename Body>
absl::Status with(void* context, Body&& body) {
  const RmaContext* const of = rma_contexts.find(context);
  RmaComm* const comm = of == nullptr ? nullptr : rma_comms.find(of->comm);
  return comm == nullptr ? not_ours("the context") : body(*comm, *of);
}

// Runs one of the four above, where its arguments are there.
template <typename Body>
Result start(const char* what, void* context, void** request, Body&& body) {
  if (request == nullptr) return fail(what, missing("the request"));
  *request = nullptr;
  const absl::Status status = with(context, body);
  return status.ok() ? Result::kSuccess : fail(what, status);
}

absl::StatusOr<std::unique_ptr<RmaComm>> join(const RmaListener& listener,
                                              absl::Span<const RmaHandle> handles, int rank) {
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
  auto made = std::make_unique<RmaComm>(*std::move(comm));
  if (made->number() == 0) return too_many();
  return made;
}

}  // namespace
}  // namespace rma

// --- comms ---------------------------------------------------------------------------------------

RmaMemory::~RmaMemory() {
  rma_memories.end(number, *this);
  window.reset();
  if (fd >= 0) ::close(fd);
}

RmaComm::RmaComm(std::shared_ptr<Communicator> comm)
    : number_(rma_comms.give(*this)), comm_(std::move(comm)) {}
RmaComm::~RmaComm() { rma_comms.end(number_, *this); }

void* RmaComm::keep(std::unique_ptr<RmaMemory> memory) {
  std::lock_guard lock(mutex_);
  memory->comm = this;
  memory->number = rma_memories.give(*memory);
  if (memory->number == 0) return nullptr;
  memory_.push_back(std::move(memory));
  return as_handle(memory_.back()->number);
}

bool RmaComm::drop(const void* handle) {
  std::unique_ptr<RmaMemory> dropped;  // destroyed without the lock: it waits for accesses
  std::lock_guard lock(mutex_);
  const auto found = std::find_if(memory_.begin(), memory_.end(), [&](const auto& one) {
    return as_handle(one->number) == handle;
  });
  if (found == memory_.end()) return false;
  rma_memories.take(handle);
  dropped = std::move(*found);
  memory_.erase(found);
  return true;
}

absl::StatusOr<const RmaMemory*> RmaComm::memory(const void* handle, const char* what) const {
  const RmaMemory* const found = rma_memories.find(handle);
  if (found == nullptr || found->comm != this) return not_ours(what);
  return found;
}

const RmaMemory* RmaComm::any_memory() {
  std::lock_guard lock(mutex_);
  return memory_.empty() ? nullptr : memory_.front().get();
}

RmaRequest* RmaComm::take() {
  std::lock_guard lock(mutex_);
  if (free_.empty()) {
    const auto chunk = static_cast<uint32_t>(made_.size());
    if (chunk == chunks_.size()) return nullptr;
    RmaRequest* const first = made_.emplace_back(new RmaRequest[kChunk]).get();
    for (uint32_t i = kChunk; i-- > 0;) {
      first[i].index = chunk * kChunk + i;
      free_.push_back(&first[i]);
    }
    chunks_[chunk].store(first, std::memory_order_release);
  }
  RmaRequest* const request = free_.back();
  free_.pop_back();
  request->generation.fetch_add(1, std::memory_order_relaxed);
  request->done.store(false, std::memory_order_relaxed);
  request->result = absl::OkStatus();
  return request;
}

void RmaComm::give_back(RmaRequest* request) {
  std::lock_guard lock(mutex_);
  const uint32_t generation = request->generation.load(std::memory_order_relaxed);
  if (generation % 2 == 0) return;
  request->generation.store((generation + 1) % kGenerations, std::memory_order_relaxed);
  free_.push_back(request);
}

void* RmaComm::handle_of(const RmaRequest& request) const {
  return as_handle(
      ((number_ & 0xffff) << kGenerationBits | request.generation.load(std::memory_order_relaxed))
          << kIndexBits |
      request.index);
}

RmaRequest* RmaComm::request(const void* handle) const {
  const uintptr_t index = reinterpret_cast<uintptr_t>(handle) & ((uintptr_t{1} << kIndexBits) - 1);
  RmaRequest* const chunk = chunks_[index / kChunk].load(std::memory_order_acquire);
  if (chunk == nullptr) return nullptr;
  RmaRequest& request = chunk[index % kChunk];
  const bool open = request.generation.load(std::memory_order_relaxed) % 2 == 1;
  return open && handle_of(request) == handle ? &request : nullptr;
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
  const Result result = ncclNetPlugin_v12.properties(device, out);
  if (result == Result::kSuccess) out->device_type = device_type;
  return result;
}

Result listen(void* context, int device, void* handle, void** listener) {
  if (handle == nullptr || listener == nullptr) {
    return fail("RMA listen", missing("the handle or the comm"));
  }
  const absl::StatusOr<size_t> place = place_of(context);
  if (!place.ok()) return fail("RMA listen", place.status());
  auto endpoint = endpoint_for(device, *place);
  if (!endpoint.ok()) return fail("RMA listen", endpoint.status());
  auto made = std::make_unique<RmaListener>();
  made->endpoint = *std::move(endpoint);
  made->handle.number = doors().next_listener++;
  made->endpoint->handle().bytes().copy(made->handle.endpoint.data(), Handle::kBytes);
  std::memset(handle, 0, kHandleBytes);
  std::memcpy(handle, &made->handle, sizeof made->handle);
  return give("RMA listen", listeners, std::move(made), listener);
}

// The context is not looked at: NCCL 2.31 passes its net's.
Result connect(void*, void* handles[], int ranks, int rank, void* listener, void** comm) {
  if (handles == nullptr || comm == nullptr) {
    return fail("RMA connect", missing("the list of handles or the comm"));
  }
  if (rank < 0 || rank >= ranks) {
    return fail("RMA connect",
                absl::InvalidArgumentError(absl::StrFormat("rank %d of %d", rank, ranks)));
  }
  std::vector<RmaHandle> all(static_cast<size_t>(ranks));
  for (size_t i = 0; i < all.size(); ++i) {
    if (handles[i] == nullptr) return fail("RMA connect", missing("a handle"));
    std::memcpy(&all[i], handles[i], sizeof all[i]);
  }
  const RmaListener* const from = listeners.find(listener);
  if (from == nullptr) return fail("RMA connect", not_ours("the listener"));
  auto made = join(*from, all, rank);
  if (!made.ok()) return fail("RMA connect", made.status());
  *comm = as_handle((*made).release()->number());
  return Result::kSuccess;
}

Result create_context(void* comm, int contexts, void** context) {
  constexpr const char* kWhat = "RMA context";
  if (context == nullptr) return fail(kWhat, missing("the context"));
  RmaComm* const of = rma_comms.find(comm);
  if (of == nullptr) return fail(kWhat, not_ours("the comm"));
  if (contexts < 1) {
    return fail(kWhat, absl::InvalidArgumentError(absl::StrFormat("%d contexts", contexts)));
  }
  auto made =
      std::make_unique<RmaContext>(RmaContext{of->number(), of->take_tags(contexts), contexts});
  return give(kWhat, rma_contexts, std::move(made), context);
}

Result register_memory(void* comm, void* data, size_t size, int type, int fd, uint64_t offset,
                       void** memory) {
  constexpr const char* kWhat = "RMA registration";
  if (memory == nullptr) return fail(kWhat, missing("the handle"));
  RmaComm* const of = rma_comms.find(comm);
  if (of == nullptr) return fail(kWhat, not_ours("the comm"));
  if (type != kHostPointer && type != kCudaPointer) {
    return fail(kWhat, absl::InvalidArgumentError(absl::StrFormat("memory of type %d", type)));
  }
  auto made = std::make_unique<RmaMemory>();
  WindowOptions options{.signals = 0, .words = true};
  if (fd >= 0) {
    made->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    options.file = {.fd = made->fd, .offset = offset, .dma_buf = true};
  }
  auto window = Window::create(of->comm(), data, size, options);
  if (!window.ok()) return fail(kWhat, window.status());
  made->window = *std::move(window);
  *memory = of->keep(std::move(made));
  return *memory != nullptr ? Result::kSuccess : fail(kWhat, too_many());
}

Result deregister(void* comm, void* memory) {
  RmaComm* const of = rma_comms.find(comm);
  if (of != nullptr && (memory == nullptr || of->drop(memory))) return Result::kSuccess;
  return fail("RMA deregistration", not_ours("the comm or the handle"));
}

Result destroy_context(void* context) {
  return take_back("RMA context's end", rma_contexts, context);
}
Result close_comm(void* comm) { return take_back("RMA close", rma_comms, comm); }
Result close_listen(void* listener) {
  return take_back("RMA close of a listener", listeners, listener);
}

Result put(void* context, const RmaAccess& access, void** request) {
  return start("RMA put", context, request, [&](RmaComm& comm, const RmaContext& of) {
    return plain(comm, of, access, true, request);
  });
}
Result put_signal(void* context, const RmaAccess& access, void** request) {
  return start("RMA put with signal", context, request, [&](RmaComm& comm, const RmaContext& of) {
    return put_and_signal(comm, of, access, request);
  });
}
Result get(void* context, const RmaAccess& access, void** request) {
  return start("RMA get", context, request, [&](RmaComm& comm, const RmaContext& of) {
    return plain(comm, of, access, false, request);
  });
}
Result flush(void* context, int number, void* memory, uint32_t rank, void** request) {
  return start("RMA flush", context, request, [&](RmaComm& comm, const RmaContext& of) {
    return flush_to(comm, of, number, memory, rank, request);
  });
}

Result test(void* comm, void* request, int* done) {
  if (done == nullptr) return fail("RMA test", missing("the answer"));
  *done = 0;
  RmaComm* const of = rma_comms.find(comm);
  RmaRequest* const tested = of == nullptr ? nullptr : of->request(request);
  if (tested == nullptr) return fail("RMA test", not_ours("the comm or the request"));
  if (!tested->done.load(std::memory_order_acquire)) {
    of->comm().progress();
    if (!tested->done.load(std::memory_order_acquire)) return Result::kSuccess;
  }
  const absl::Status result = std::move(tested->result);
  of->give_back(tested);
  *done = 1;
  return result.ok() ? Result::kSuccess : fail("RMA", result);
}

Result progress(void* context) {
  const absl::Status status = with(context, [](RmaComm& comm, const RmaContext&) {
    comm.comm().progress();
    return comm.comm().status();
  });
  return status.ok() ? Result::kSuccess : fail("RMA progress", status);
}

Result query_last_error(void* context, bool* failed) {
  if (failed == nullptr) return fail("RMA error query", missing("the answer"));
  const absl::Status status = with(context, [failed](RmaComm& comm, const RmaContext&) {
    *failed = !comm.comm().status().ok();
    return absl::OkStatus();
  });
  return status.ok() ? Result::kSuccess : fail("RMA error query", status);
}

}  // namespace rma
}  // namespace baton::nccl
