// The C interface: endpoints, where ranks meet, communicators.
#include <algorithm>
#include <atomic>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "capi/agent_handle.h"
#include "capi/comm_handle.h"
#include "collectives/launch.h"

using namespace baton::capi;
using baton::collectives::RendezvousServer;

struct baton_rendezvous {
  const baton::base::MadeHere made_here;
  std::unique_ptr<RendezvousServer> server;
};

// The numbers of types and operations are the library's.
static_assert(BATON_I64 == static_cast<int>(baton::DataType::kI64));
static_assert(BATON_F8E5M2 == static_cast<int>(baton::DataType::kF8E5M2));
static_assert(BATON_BOOL == static_cast<int>(baton::DataType::kBool));
static_assert(BATON_BOOL + 1 == baton::kDataTypes);
static_assert(BATON_AVG == static_cast<int>(baton::ReduceOp::kAvg));
static_assert(BATON_PREMUL_SUM == static_cast<int>(baton::ReduceOp::kPreMulSum));
static_assert(BATON_XOR + 1 == baton::kReduceOps);
static_assert(BATON_ANY_RANK == baton::kAnyRank);

namespace {

absl::StatusOr<baton::ClusterKey> key_of(const char* file) {
  return file == nullptr || *file == 0 ? baton::ClusterKey::for_this_user()
                                       : baton::ClusterKey::from_file(file);
}

uint64_t next_serial() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

// Other clusters' keys are told apart from what else is wrong.
int32_t result_of_joining(const absl::Status& status, baton_error* error, About about) {
  return absl::IsUnauthenticated(status) ? result_of(absl::DataLossError(status.message()), error)
                                         : result_of(status, error, about);
}

bool read_options(const baton_comm_options* from, baton_comm_options& out) {
  baton_comm_options_init(&out, sizeof out);
  return from == nullptr || read_sized(from, out);
}
constexpr char kFillIn[] = "options: fill them in with baton_comm_options_init()";

int32_t give_comm(absl::StatusOr<std::unique_ptr<baton::Communicator>> made, baton_comm** out,
                  baton_error* error) {
  if (!made.ok()) return result_of_joining(ended(made.status()), error, About::kOther);
  if (*made == nullptr) return result_of(absl::OkStatus(), error);  // in no group
  auto handle = std::make_unique<baton_comm>();
  handle->comm = *std::move(made);
  handle->serial = next_serial();
  *out = handle.release();
  return result_of(absl::OkStatus(), error);
}

void put(const baton::Handle& from, baton_handle& out) {
  static_assert(sizeof out.bytes == baton::Handle::kBytes);
  const std::string bytes = from.bytes();
  std::copy(bytes.begin(), bytes.end(), out.bytes);
}

absl::StatusOr<std::vector<baton::Handle>> handles_of(const baton_handle* list, size_t count) {
  std::vector<baton::Handle> out;
  if (is_missing(list, count)) {
    return absl::InvalidArgumentError("handles is NULL although count is not 0");
  }
  for (size_t i = 0; i < count; ++i) {
    auto one =
        baton::Handle::decode({reinterpret_cast<const char*>(list[i].bytes), sizeof list[i].bytes});
    if (!one.ok()) {
      return absl::Status(one.status().code(),
                          absl::StrFormat("handle %d: %s", i, one.status().message()));
    }
    out.push_back(*one);
  }
  return out;
}

// make(options)
template <typename Make>
int32_t make_group(const baton_comm_options* options, baton_comm** out, baton_error* error,
                   Make&& make) {
  if (!cleared(out)) return invalid(kNoHandle, error);
  baton_comm_options from;
  if (!read_options(options, from)) return invalid(kFillIn, error);
  const Making making;
  baton::GroupOptions wanted;
  wanted.uuid = from.uuid;
  if (from.name != nullptr) wanted.name = from.name;
  set_time(from.start_timeout, wanted.start_timeout);
  set_time(from.timeout, wanted.timeout);
  wanted.ordered = from.ordered != 0;
  wanted.tune = from.tune != 0;
  return make(std::move(wanted));
}

absl::StatusOr<std::unique_ptr<baton_comm>> meet(baton_endpoint* endpoint, const baton_place& place,
                                                 const baton_comm_options& wanted) {
  auto handle = std::make_unique<baton_comm>();
  baton::CommunicatorOptions options;
  if (endpoint != nullptr) {
    options.endpoint = endpoint->endpoint;
    options.worker.key = endpoint->key;
  }
  options.rank = place.rank;
  options.ranks = place.ranks;
  options.rendezvous = view(place.rendezvous);
  options.generation = place.generation;
  if (wanted.name != nullptr) options.name = wanted.name;
  set_time(wanted.start_timeout, options.start_timeout);
  set_time(wanted.timeout, options.timeout);
  options.ordered = wanted.ordered != 0;
  options.tune = wanted.tune != 0;
  if (place.serves != 0 && place.ranks > 1) {
    absl::StatusOr<baton::ClusterKey> key =
        options.worker.key.has_value() ? *options.worker.key : baton::ClusterKey::for_this_user();
    if (!key.ok()) return key.status();
    auto serves =
        RendezvousServer::start_at(*key, options.rendezvous, static_cast<uint32_t>(options.ranks));
    if (!serves.ok()) return serves.status();
    handle->serves = *std::move(serves);
  }
  auto comm = baton::Communicator::create(std::move(options));
  if (!comm.ok()) return comm.status();
  handle->comm = *std::move(comm);
  handle->serial = next_serial();
  return handle;
}

}  // namespace

extern "C" {

// --- endpoints ---

void baton_endpoint_options_init(baton_endpoint_options* options, size_t size) {
  init_sized(baton_endpoint_options{}, options, size);
}

int32_t baton_endpoint_open(const baton_endpoint_options* options, baton_endpoint** out,
                            baton_error* error) {
  if (!cleared(out)) return invalid(kNoHandle, error);
  baton_endpoint_options all;
  baton_endpoint_options_init(&all, sizeof all);
  if (options != nullptr && !read_sized(options, all)) {
    return invalid("options: fill them in with baton_endpoint_options_init()", error);
  }
  return caught(error, [&] {
    auto worker = worker_options({all.providers, all.require, all.key_file, all.listen_host,
                                  all.listen_port, 0, all.settings, all.advertise});
    if (!worker.ok()) return result_of(worker.status(), error, About::kMaking);
    const Making making;
    auto handle = std::make_unique<baton_endpoint>();
    handle->key = worker->key;
    baton::EndpointOptions wanted;
    wanted.worker = *std::move(worker);
    wanted.background = all.background != 0;
    if (all.pool_bytes != 0) wanted.slab_bytes = all.pool_bytes;
    auto made = baton::Endpoint::open(std::move(wanted));
    if (!made.ok()) return result_of(made.status(), error, About::kMaking);
    handle->endpoint = *std::move(made);
    *out = handle.release();
    return result_of(absl::OkStatus(), error);
  });
}

void baton_endpoint_close(baton_endpoint* endpoint) { delete endpoint; }

int32_t baton_endpoint_handle(const baton_endpoint* endpoint, baton_handle* out,
                              baton_error* error) {
  if (!cleared(out)) return invalid(kNoHandle, error);
  return with(endpoint, error, [&](baton::Endpoint& real) { put(real.handle(), *out); });
}

int baton_endpoint_progress(baton_endpoint* endpoint) {
  return with(endpoint, nullptr, [](baton::Endpoint& real) { return int32_t{real.progress()}; }) ==
         1;
}

int baton_endpoint_event_fd(const baton_endpoint* endpoint) {
  const int32_t fd =
      with(endpoint, nullptr, [](baton::Endpoint& real) { return int32_t{real.event_fd()}; });
  return fd < 0 ? -1 : fd;
}

int32_t baton_endpoint_allocate(baton_endpoint* endpoint, uint64_t bytes, void** out,
                                baton_error* error) {
  if (!cleared(out)) return invalid("out is NULL: pass the address for the memory", error);
  if (bytes == 0) return invalid("no bytes cannot be allocated: ask for at least one", error);
  return with(endpoint, error, [&](baton::Endpoint& real) {
    const auto buffer = real.allocate(bytes);
    if (!buffer.ok()) return result_of(buffer.status(), error, About::kMaking);
    std::lock_guard lock(endpoint->mutex);
    endpoint->buffers.emplace(buffer->data, *buffer);
    *out = buffer->data;
    return result_of(absl::OkStatus(), error);
  });
}

int32_t baton_endpoint_free(baton_endpoint* endpoint, void* data, baton_error* error) {
  return with(endpoint, error, [&](baton::Endpoint& real) {
    std::lock_guard lock(endpoint->mutex);
    const auto found = endpoint->buffers.find(data);
    if (found == endpoint->buffers.end()) {
      return absl::NotFoundError(
          absl::StrFormat("%p is no memory of this endpoint: pass what baton_endpoint_allocate() "
                          "gave and that is not freed yet",
                          data));
    }
    real.free(found->second);
    endpoint->buffers.erase(found);
    return absl::OkStatus();
  });
}

// --- where ranks meet ---

int32_t baton_rendezvous_open(const char* listen, uint32_t ranks, const char* key_file,
                              baton_rendezvous** out, baton_bytes* address, baton_error* error) {
  give_nothing(address);
  if (!cleared(out)) return invalid(kNoHandle, error);
  return caught(error, [&] {
    const Making making;
    auto key = key_of(key_file);
    if (!key.ok()) return result_of(key.status(), error, About::kMaking);
    const std::string where(view(listen));
    auto server = where.empty() || where == "*" ? RendezvousServer::start(*key, where, 0, ranks)
                                                : RendezvousServer::start_at(*key, where, ranks);
    if (!server.ok()) return result_of(server.status(), error, About::kMaking);
    auto handle = std::make_unique<baton_rendezvous>();
    handle->server = *std::move(server);
    const int32_t result = result_of(give(handle->server->address(), address), error);
    if (result == BATON_OK) *out = handle.release();
    return result;
  });
}

void baton_rendezvous_close(baton_rendezvous* rendezvous) {
  if (rendezvous == nullptr) return;
  if (rendezvous->made_here.elsewhere()) (void)rendezvous->server.release();  // the parent's
  delete rendezvous;
}

int32_t baton_place_from_environment(baton_place* out, baton_bytes* rendezvous,
                                     baton_error* error) {
  give_nothing(rendezvous);
  if (out == nullptr || out->size < sizeof out->size || rendezvous == nullptr) {
    return invalid("out is NULL or has no size, or rendezvous is NULL: set it to BATON_PLACE_INIT",
                   error);
  }
  return caught(error, [&] {
    auto place = baton::launch::from_environment();
    if (!place.ok()) return place.status();
    if (!place->has_value()) {
      return absl::NotFoundError(
          "no launcher started this process: start it by torchrun, mpirun, srun or baton launch, "
          "or set BATON_RANK, BATON_RANKS and BATON_RENDEZVOUS");
    }
    const baton::launch::Place& found = **place;
    absl::Status given = give(found.rendezvous, rendezvous);
    if (!given.ok()) return given;
    const baton_place all{
        sizeof all,       rendezvous->data,  found.rank,       found.ranks,
        found.local_rank, found.local_ranks, found.generation, static_cast<uint8_t>(found.serves)};
    write_sized(all, out);
    return absl::OkStatus();
  });
}

// --- communicators ---

void baton_comm_options_init(baton_comm_options* options, size_t size) {
  baton_comm_options defaults{};
  defaults.tune = 1;
  init_sized(defaults, options, size);
}

int32_t baton_comm_meet(baton_endpoint* endpoint, const baton_place* place,
                        const baton_comm_options* options, baton_comm** out, baton_error* error) {
  if (!cleared(out)) return invalid(kNoHandle, error);
  baton_place where = BATON_PLACE_INIT;
  if (!read_sized(place, where)) return invalid("place: set it to BATON_PLACE_INIT first", error);
  baton_comm_options wanted;
  if (!read_options(options, wanted)) return invalid(kFillIn, error);
  return caught(error, [&] {
    const Making making;
    auto made = meet(endpoint, where, wanted);
    if (!made.ok()) return result_of_joining(made.status(), error, About::kMaking);
    *out = made->release();
    return result_of(absl::OkStatus(), error);
  });
}

int32_t baton_comm_create(baton_endpoint* endpoint, const baton_handle* handles, size_t count,
                          const baton_comm_options* options, baton_comm** out, baton_error* error) {
  return make_group(options, out, error, [&](baton::GroupOptions wanted) {
    return with(endpoint, error, [&](baton::Endpoint&) {
      const auto all = handles_of(handles, count);
      if (!all.ok()) return result_of(all.status(), error);
      return give_comm(baton::Communicator::create(endpoint->endpoint, *all, std::move(wanted)),
                       out, error);
    });
  });
}

int32_t baton_comm_split(baton_comm* comm, int32_t color, int32_t key,
                         const baton_comm_options* options, baton_comm** out, baton_error* error) {
  return make_group(options, out, error, [&](baton::GroupOptions wanted) {
    return with(comm, error, [&](baton::Communicator& group) {
      return give_comm(group.split(color, key, std::move(wanted)), out, error);
    });
  });
}

int32_t baton_comm_subgroup(baton_comm* comm, const int32_t* ranks, size_t count,
                            const baton_comm_options* options, baton_comm** out,
                            baton_error* error) {
  if (is_missing(ranks, count)) return missing(error);
  return make_group(options, out, error, [&](baton::GroupOptions wanted) {
    return with(comm, error, [&](baton::Communicator& group) {
      return give_comm(group.subgroup({ranks, count}, std::move(wanted)), out, error);
    });
  });
}

int32_t baton_comm_reconfigure(baton_comm* comm, const baton_handle* handles, size_t count,
                               uint64_t uuid, int64_t timeout, baton_work* work,
                               baton_error* error) {
  if (!cleared(work)) return invalid("work is NULL: pass the address for the number", error);
  return with(comm, error, [&](baton::Communicator& group) {
    const auto all = handles_of(handles, count);
    if (!all.ok()) return all.status();
    const auto started = group.reconfigure(*all, uuid, timeout_of(timeout));
    if (started.ok()) *work = number_of(*comm, *started);
    return ended(started.status());
  });
}

int32_t baton_comm_endpoint(const baton_comm* comm, baton_endpoint** out, baton_error* error) {
  if (!cleared(out)) return invalid(kNoHandle, error);
  return with(comm, error, [&](baton::Communicator& group) {
    auto handle = std::make_unique<baton_endpoint>();
    handle->endpoint = group.endpoint();
    *out = handle.release();
  });
}

int32_t baton_comm_handles(const baton_comm* comm, baton_handle* out, size_t room, size_t* count,
                           baton_error* error) {
  give_nothing(count);
  if (is_missing(out, room)) return missing(error);
  return with(comm, error, [&](baton::Communicator& group) {
    const std::vector<baton::Handle> all = group.handles();
    for (size_t i = 0; i < all.size() && i < room; ++i) put(all[i], out[i]);
    if (count != nullptr) *count = all.size();
  });
}

int32_t baton_comm_state(const baton_comm* comm, baton_error* error) {
  return with(comm, error, [&](baton::Communicator& group) {
    if (group.state() == baton::GroupState::kStarting) return int32_t{BATON_IN_PROGRESS};
    return result_of(ended(group.status()), error);
  });
}

int32_t baton_comm_wait_ready(baton_comm* comm, int64_t timeout, baton_error* error) {
  return with(comm, error, [&](baton::Communicator& group) {
    const absl::Status status = group.wait_ready(timeout_of(timeout));
    const bool starts = group.state() == baton::GroupState::kStarting;
    // It may have become ready, or broken, just after the wait ended.
    return starts ? status : ended(group.status());
  });
}

int32_t baton_comm_shrink(baton_comm* comm, baton_comm** out, baton_error* error) {
  if (!cleared(out)) return invalid(kNoHandle, error);
  return with(comm, error, [&](baton::Communicator& group) {
    const Making making;
    return give_comm(group.shrink(), out, error);
  });
}

int32_t baton_comm_abort(baton_comm* comm, const char* why, baton_error* error) {
  return with(comm, error, [&](baton::Communicator& group) {
    group.abort(absl::CancelledError(std::string(view(why))));
  });
}

int32_t baton_comm_rank(const baton_comm* comm) {
  const int32_t result = with(comm, nullptr, [](auto& group) { return int32_t{group.rank()}; });
  return result < 0 ? -1 : result;
}

int32_t baton_comm_ranks(const baton_comm* comm) {
  const int32_t result = with(comm, nullptr, [](auto& group) { return int32_t{group.ranks()}; });
  return result < 0 ? -1 : result;
}

int32_t baton_comm_lost(const baton_comm* comm, int32_t* out, size_t room, size_t* count,
                        baton_error* error) {
  give_nothing(count);
  if (is_missing(out, room)) return missing(error);
  return with(comm, error,
              [&](baton::Communicator& group) { give_list(group.lost_ranks(), out, room, count); });
}

int32_t baton_comm_explain(const baton_comm* comm, int32_t kind, uint64_t bytes, baton_bytes* out,
                           baton_error* error) {
  give_nothing(out);
  return with(comm, error, [&](baton::Communicator& group) {
    const std::optional<baton::Collective> what = collective_of(kind);
    if (!what) return no_such_kind(kind);
    return give(group.explain(*what, bytes), out);
  });
}

int32_t baton_comm_routes(const baton_comm* comm, baton_bytes* out, baton_error* error) {
  give_nothing(out);
  return with(comm, error, [&](baton::Communicator& group) { return give(group.routes(), out); });
}

int32_t baton_comm_flight_record(const baton_comm* comm, baton_bytes* out, baton_error* error) {
  give_nothing(out);
  return with(comm, error,
              [&](baton::Communicator& group) { return give(group.flight_record(), out); });
}

int32_t baton_comm_get_stats(const baton_comm* comm, baton_comm_stats* out, baton_error* error) {
  return with(comm, error, [&](baton::Communicator& group) {
    const baton::CommunicatorStats now = group.stats();
    // A counter that is added there has to be added here, and in python/baton/_library.py.
    const auto& [calls, messages, bytes_sent, direct_bytes, sleeps, staged_calls, staged_bytes,
                 link_bytes] = now;
    const baton_comm_stats all{sizeof all, calls,        messages,     bytes_sent, direct_bytes,
                               sleeps,     staged_calls, staged_bytes, link_bytes};
    return give_sized(all, out, "out: set its size to sizeof(baton_comm_stats)", error);
  });
}

void baton_comm_destroy(baton_comm* comm) {
  if (comm == nullptr) return;
  if (comm->made_here.elsewhere()) (void)comm->serves.release();  // the parent's
  delete comm;
}

}  // extern "C"
