// The public calls: arguments put together and handed to the parts, and what those are asked.
#include "collectives/communicator.h"

#include <unistd.h>

#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "collectives/internal/communicator_impl.h"
#include "collectives/rendezvous.h"
#include "transport/base/log.h"

namespace baton {

using collectives::RankInfo;
using collectives::internal::EndpointImpl;
using collectives::internal::Mesh;
using collectives::internal::Request;

namespace {

// The facts that ranks learn of each other at a rendezvous, by rank.
struct Members {
  std::vector<Handle> handles;
  std::vector<std::string> addresses;
  uint64_t uuid = 0;
};

absl::StatusOr<Members> meet_at_rendezvous(Endpoint& endpoint, const CommunicatorOptions& options) {
  const std::optional<ClusterKey>& given = options.worker.key;
  absl::StatusOr<ClusterKey> key =
      given ? absl::StatusOr<ClusterKey>(*given) : ClusterKey::for_this_user();
  if (!key.ok()) return key.status();
  RankInfo info;
  info.rank = static_cast<uint32_t>(options.rank);
  info.ranks = static_cast<uint32_t>(options.ranks);
  info.generation = options.generation;
  info.version = collectives::kCollectivesVersion;
  info.pid = static_cast<uint32_t>(getpid());
  info.host = collectives::internal::host_name();
  info.worker_address = endpoint.worker().address();
  info.payload = endpoint.handle().bytes();
  // Each rank adds to the group's uuid: no group has the one of another.
  const WorkerUid nonce = WorkerUid::random();
  info.payload.append(reinterpret_cast<const char*>(nonce.bytes.data()), nonce.bytes.size());
  std::vector<RankInfo> all = {info};
  if (options.ranks > 1) {
    absl::StatusOr<std::vector<RankInfo>> met =
        collectives::meet(options.rendezvous, *key, info, options.start_timeout);
    if (!met.ok()) return met.status();
    all = *std::move(met);
  }
  Members members;
  for (const RankInfo& one : all) {
    absl::StatusOr<Handle> handle =
        Handle::decode(std::string_view(one.payload).substr(0, Handle::kBytes));
    if (!handle.ok()) return handle.status();
    members.handles.push_back(*handle);
    members.addresses.push_back(one.worker_address);
    uint64_t part = 0;
    std::memcpy(&part, one.payload.data() + Handle::kBytes,
                std::min(sizeof part, one.payload.size() - Handle::kBytes));
    members.uuid ^= part;
  }
  if (members.uuid == 0) members.uuid = 1;
  return members;
}

// A call that combines nothing.
Request moving(Collective what, const void* in, void* out, size_t count, DataType type,
               const CallOptions& options, int root = 0) {
  return {what, in, out, count, type, ReduceOp::kSum, root, &options};
}

}  // namespace

Communicator::Communicator(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Communicator::~Communicator() {
  if (!impl_->core.usable().ok()) {
    (void)impl_.release();  // its threads are not here
  } else if (EndpointImpl::in_callback_of(impl_->calls.get())) {
    impl_->leave(true);
    const bool last = impl_->endpoint.use_count() == 1;
    base::log_event(
        base::LogLevel::kWarning,
        "collectives: rank %d has left the group \"%s\" in a callback of its own, which "
        "its destructor cannot wait for: some memory stays%s. Destroy a communicator "
        "when its callbacks have returned",
        rank(), name(), last ? ", and its endpoint" : "");
    if (!last) impl_->endpoint.reset();
    Impl::keep(std::move(impl_));
  }
}

absl::StatusOr<std::unique_ptr<Communicator>> Communicator::create(CommunicatorOptions options) {
  if (options.ranks < 1 || options.ranks > 4096 || options.rank < 0 ||
      options.rank >= options.ranks) {
    return absl::InvalidArgumentError(
        absl::StrFormat("rank %d of %d is out of range: ranks count from 0, and there may be 4096",
                        options.rank, options.ranks));
  }
  std::shared_ptr<Endpoint> endpoint = options.endpoint;
  if (endpoint == nullptr) {
    EndpointOptions own{.worker = options.worker, .background = options.background};
    own.worker.name = absl::StrCat(options.name, ".", options.rank);
    if (own.worker.listen_host.empty() && options.ranks > 1) {
      own.worker.listen_host = collectives::listen_host_for(options.rendezvous);
    }
    absl::StatusOr<std::shared_ptr<Endpoint>> opened = Endpoint::open(std::move(own));
    if (!opened.ok()) return opened.status();
    endpoint = *std::move(opened);
  } else if (absl::Status status = endpoint->impl_->usable(); !status.ok()) {
    return status;
  }
  absl::StatusOr<Members> met = meet_at_rendezvous(*endpoint, options);
  if (!met.ok()) return met.status();
  EndpointImpl& core = *endpoint->impl_;
  {
    std::lock_guard lock(core.mutex());
    for (size_t r = 0; r < met->addresses.size(); ++r) {
      if (met->handles[r] == endpoint->handle()) continue;
      core.learn(met->handles[r], std::move(met->addresses[r]));
    }
  }
  const bool calibrate = options.calibrate;
  const Time start_timeout = options.start_timeout;
  auto impl = std::make_unique<Impl>(std::move(options), std::move(endpoint), core);
  absl::Status status = impl->start(met->handles, met->uuid, true, nullptr);
  if (status.ok()) status = impl->wait_ready(start_timeout);
  if (status.ok() && calibrate) status = impl->calibrate();
  if (!status.ok()) return status;
  return std::unique_ptr<Communicator>(new Communicator(std::move(impl)));
}

absl::StatusOr<std::unique_ptr<Communicator>> Communicator::create(
    std::shared_ptr<Endpoint> endpoint, absl::Span<const Handle> in_rank_order,
    GroupOptions options) {
  if (endpoint == nullptr) {
    return absl::InvalidArgumentError("a communicator needs an endpoint: Endpoint::open() one");
  }
  if (absl::Status status = endpoint->impl_->usable(); !status.ok()) return status;
  const uint64_t uuid = options.uuid;
  EndpointImpl& core = *endpoint->impl_;
  auto impl = std::make_unique<Impl>(collectives::internal::options_of(std::move(options)),
                                     std::move(endpoint), core);
  absl::Status status = impl->start(in_rank_order, uuid, true, nullptr);
  if (!status.ok()) return status;
  return std::unique_ptr<Communicator>(new Communicator(std::move(impl)));
}

int Communicator::rank() const { return impl_->rank; }
int Communicator::ranks() const { return impl_->ranks; }
const std::string& Communicator::name() const { return impl_->options.name; }
const std::shared_ptr<Endpoint>& Communicator::endpoint() const { return impl_->endpoint; }
GroupState Communicator::state() const {
  const std::lock_guard lock(impl_->mutex);
  if (impl_->reconfiguring.has_value()) return GroupState::kStarting;
  if (!impl_->failure.broken().ok()) return GroupState::kBroken;
  return impl_->mesh.starting() ? GroupState::kStarting : GroupState::kReady;
}
absl::Status Communicator::wait_ready(Time timeout) {
  const absl::Status usable = impl_->core.usable();
  return usable.ok() ? impl_->wait_ready(timeout) : usable;
}
std::vector<Handle> Communicator::handles() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->mesh.handles();
}

absl::StatusOr<std::unique_ptr<Communicator>> Communicator::split(int color, int key,
                                                                  GroupOptions options) {
  return impl_->split(color, key, std::move(options));
}
absl::StatusOr<std::unique_ptr<Communicator>> Communicator::subgroup(absl::Span<const int> ranks,
                                                                     GroupOptions options) {
  return impl_->subgroup(ranks, std::move(options));
}
absl::StatusOr<Work> Communicator::reconfigure(absl::Span<const Handle> in_rank_order,
                                               uint64_t uuid, Time timeout) {
  return impl_->reconfigure(in_rank_order, uuid, timeout);
}

absl::StatusOr<CommBuffer> Communicator::allocate(size_t bytes) {
  return impl_->endpoint->allocate(bytes);
}
void Communicator::free(const CommBuffer& buffer) { impl_->endpoint->free(buffer); }

absl::StatusOr<Work> Communicator::all_reduce_async(const void* in, void* out, size_t count,
                                                    DataType type, ReduceOp op,
                                                    const CallOptions& options) {
  return impl_->starter->begin({Collective::kAllReduce, in, out, count, type, op, 0, &options});
}

absl::StatusOr<Work> Communicator::reduce_scatter_async(const void* in, void* out, size_t count,
                                                        DataType type, ReduceOp op,
                                                        const CallOptions& options) {
  return impl_->starter->begin({Collective::kReduceScatter, in, out, count, type, op, 0, &options});
}

absl::StatusOr<Work> Communicator::all_gather_async(const void* in, void* out, size_t count,
                                                    DataType type, const CallOptions& options) {
  return impl_->starter->begin(moving(Collective::kAllGather, in, out, count, type, options));
}

absl::StatusOr<Work> Communicator::broadcast_async(const void* in, void* out, size_t count,
                                                   DataType type, int root,
                                                   const CallOptions& options) {
  return impl_->starter->begin(moving(Collective::kBroadcast, in, out, count, type, options, root));
}

absl::StatusOr<Work> Communicator::reduce_async(const void* in, void* out, size_t count,
                                                DataType type, ReduceOp op, int root,
                                                const CallOptions& options) {
  return impl_->starter->begin({Collective::kReduce, in, out, count, type, op, root, &options});
}

absl::StatusOr<Work> Communicator::all_to_all_async(const void* in, void* out, size_t count,
                                                    DataType type, const CallOptions& options) {
  return impl_->starter->begin(moving(Collective::kAllToAll, in, out, count, type, options));
}

absl::StatusOr<Work> Communicator::scatter_async(const void* in, void* out, size_t count,
                                                 DataType type, int root,
                                                 const CallOptions& options) {
  return impl_->starter->begin(moving(Collective::kScatter, in, out, count, type, options, root));
}

absl::StatusOr<Work> Communicator::gather_async(const void* in, void* out, size_t count,
                                                DataType type, int root,
                                                const CallOptions& options) {
  return impl_->starter->begin(moving(Collective::kGather, in, out, count, type, options, root));
}

absl::StatusOr<Work> Communicator::all_gather_v_async(const void* in, size_t count, void* out,
                                                      absl::Span<const size_t> counts,
                                                      absl::Span<const size_t> offsets,
                                                      DataType type, const CallOptions& options) {
  Request request = moving(Collective::kAllGather, in, out, count, type, options);
  request.uneven = true;
  request.blocks = {counts, offsets};
  return impl_->starter->begin(request);
}

absl::StatusOr<Work> Communicator::reduce_scatter_v_async(const void* in,
                                                          absl::Span<const size_t> counts,
                                                          absl::Span<const size_t> offsets,
                                                          void* out, DataType type, ReduceOp op,
                                                          const CallOptions& options) {
  const auto own = static_cast<size_t>(rank());
  const size_t count = own < counts.size() ? counts[own] : 0;
  Request request{Collective::kReduceScatter, in, out, count, type, op, 0, &options};
  request.uneven = true;
  request.blocks = {counts, offsets};
  return impl_->starter->begin(request);
}

absl::StatusOr<Work> Communicator::all_to_all_v_async(
    const void* in, absl::Span<const size_t> send_counts, absl::Span<const size_t> send_offsets,
    void* out, absl::Span<const size_t> receive_counts, absl::Span<const size_t> receive_offsets,
    DataType type, const CallOptions& options) {
  return impl_->starter->begin_all_to_all_v(in, {send_counts, send_offsets}, out,
                                            {receive_counts, receive_offsets}, type, options);
}

absl::StatusOr<Work> Communicator::send_async(const void* in, size_t count, DataType type, int to,
                                              const CallOptions& options) {
  return impl_->starter->begin_point_to_point(true, const_cast<void*>(in), count, type, to,
                                              options);
}

absl::StatusOr<Work> Communicator::receive_async(void* out, size_t count, DataType type, int from,
                                                 const CallOptions& options) {
  return impl_->starter->begin_point_to_point(false, out, count, type, from, options);
}

int Communicator::source_of(Work work) const {
  std::lock_guard lock(impl_->mutex);
  return impl_->calls->source_of(work);
}

absl::StatusOr<Work> Communicator::barrier_async(const CallOptions& options) {
  return impl_->starter->begin(
      {Collective::kBarrier, nullptr, nullptr, 0, DataType::kU8, ReduceOp::kSum, 0, &options});
}

namespace {
absl::Status end_of(Communicator& comm, const absl::StatusOr<Work>& work) {
  return work.ok() ? comm.wait(*work) : work.status();
}
}  // namespace

absl::Status Communicator::all_reduce(const void* in, void* out, size_t count, DataType type,
                                      ReduceOp op, const CallOptions& options) {
  return impl_->starter->run({Collective::kAllReduce, in, out, count, type, op, 0, &options});
}
absl::Status Communicator::reduce_scatter(const void* in, void* out, size_t count, DataType type,
                                          ReduceOp op, const CallOptions& options) {
  return impl_->starter->run({Collective::kReduceScatter, in, out, count, type, op, 0, &options});
}
absl::Status Communicator::all_gather(const void* in, void* out, size_t count, DataType type,
                                      const CallOptions& options) {
  return impl_->starter->run(moving(Collective::kAllGather, in, out, count, type, options));
}
absl::Status Communicator::broadcast(const void* in, void* out, size_t count, DataType type,
                                     int root, const CallOptions& options) {
  return impl_->starter->run(moving(Collective::kBroadcast, in, out, count, type, options, root));
}
absl::Status Communicator::reduce(const void* in, void* out, size_t count, DataType type,
                                  ReduceOp op, int root, const CallOptions& options) {
  return impl_->starter->run({Collective::kReduce, in, out, count, type, op, root, &options});
}
absl::Status Communicator::all_to_all(const void* in, void* out, size_t count, DataType type,
                                      const CallOptions& options) {
  return impl_->starter->run(moving(Collective::kAllToAll, in, out, count, type, options));
}
absl::Status Communicator::scatter(const void* in, void* out, size_t count, DataType type, int root,
                                   const CallOptions& options) {
  return impl_->starter->run(moving(Collective::kScatter, in, out, count, type, options, root));
}
absl::Status Communicator::gather(const void* in, void* out, size_t count, DataType type, int root,
                                  const CallOptions& options) {
  return impl_->starter->run(moving(Collective::kGather, in, out, count, type, options, root));
}
absl::Status Communicator::send(const void* in, size_t count, DataType type, int to,
                                const CallOptions& options) {
  absl::Status status = collectives::internal::check_waited_for(Collective::kSendReceive, options);
  return status.ok() ? end_of(*this, send_async(in, count, type, to, options)) : status;
}
absl::Status Communicator::receive(void* out, size_t count, DataType type, int from,
                                   const CallOptions& options) {
  absl::Status status = collectives::internal::check_waited_for(Collective::kSendReceive, options);
  return status.ok() ? end_of(*this, receive_async(out, count, type, from, options)) : status;
}
absl::Status Communicator::barrier(const CallOptions& options) {
  return impl_->starter->run(
      {Collective::kBarrier, nullptr, nullptr, 0, DataType::kU8, ReduceOp::kSum, 0, &options});
}

absl::StatusOr<Work> Communicator::group_begin() {
  if (absl::Status usable = impl_->core.usable(); !usable.ok()) return usable;
  std::lock_guard lock(impl_->mutex);
  if (!impl_->failure.broken().ok()) return impl_->failure.broken();
  return impl_->calls->group_begin();
}
absl::Status Communicator::group_end(Work group) {
  if (absl::Status usable = impl_->core.usable(); !usable.ok()) return usable;
  std::lock_guard lock(impl_->mutex);
  return impl_->calls->group_end(group);
}
absl::Status Communicator::hold(Work work, DeviceStream stream) {
  if (absl::Status usable = impl_->core.usable(); !usable.ok()) return usable;
  if (absl::Status status = impl_->calls->prepare(stream); !status.ok()) return status;
  std::lock_guard lock(impl_->mutex);
  return impl_->calls->hold(work, stream);
}

absl::Status Communicator::wait(Work work, Time timeout) {
  const absl::Status usable = impl_->core.usable();
  return usable.ok() ? impl_->driver->wait(work, timeout) : usable;
}
std::optional<absl::Status> Communicator::test(Work work) {
  Impl& impl = *impl_;
  if (const absl::Status usable = impl.core.usable(); !usable.ok()) return usable;
  {
    const std::lock_guard lock(impl.mutex);
    if (!impl.driver->background()) {
      if (!impl.driver->advance()) impl.core.advance_others(&impl);
      impl.driver->tick_sometimes();
    }
    if (!impl.core.any_ended()) return impl.calls->reap(work);
  }
  impl.core.run_callbacks();
  const std::lock_guard lock(impl.mutex);
  return impl.calls->reap(work);
}

bool Communicator::progress() {
  Impl& impl = *impl_;
  if (!impl.core.usable().ok()) return false;
  bool any = false;
  {
    const std::lock_guard lock(impl.mutex);
    any = impl.driver->advance();
    any |= impl.core.advance_others(&impl);
    impl.driver->tick_sometimes();
    if (!impl.core.any_ended()) return any;
  }
  impl.core.run_callbacks();
  return true;
}

void Communicator::abort(const absl::Status& why) {
  if (!impl_->core.usable().ok()) return;
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->failure.fail(
        absl::Status(why.ok() ? absl::StatusCode::kAborted : why.code(),
                     absl::StrCat("rank ", rank(), " called abort(): ", why.message())),
        impl_->mesh.rank());
  }
  impl_->core.run_callbacks();
}

absl::Status Communicator::status() const {
  if (const absl::Status usable = impl_->core.usable(); !usable.ok()) return usable;
  if (!impl_->failure.is_broken()) return absl::OkStatus();
  const std::lock_guard lock(impl_->mutex);
  return impl_->failure.broken();
}

std::vector<int> Communicator::lost_ranks() const {
  const std::lock_guard lock(impl_->mutex);
  std::vector<int> lost;
  for (uint32_t r = 0; r < impl_->mesh.ranks(); ++r) {
    if (impl_->failure.lost()[r]) lost.push_back(static_cast<int>(r));
  }
  return lost;
}

absl::StatusOr<std::unique_ptr<Communicator>> Communicator::shrink() { return impl_->shrink(); }

std::string Communicator::explain(Collective collective, size_t bytes,
                                  const CallOptions& options) const {
  const std::lock_guard lock(impl_->mutex);
  Request request;
  request.collective = collective;
  request.options = &options;
  collectives::prediction::CallShape shape = impl_->starter->shape_of(request);
  shape.bytes = bytes;
  return absl::StrCat(impl_->tuner->explain(shape),
                      impl_->devices->explain_sums(collective, bytes));
}

std::string Communicator::routes() const {
  const std::lock_guard lock(impl_->mutex);
  std::string out;
  for (const Mesh::Member& member : impl_->mesh.members()) {
    if (member.link != nullptr)
      absl::StrAppend(&out, member.label, ": ", member.link->route(), "\n");
  }
  absl::StrAppend(&out, impl_->devices->explain());
  return out;
}

std::string Communicator::flight_record() const { return impl_->recorder.text(); }

CommunicatorStats Communicator::stats() const {
  const std::lock_guard lock(impl_->mutex);
  CommunicatorStats stats;
  stats.calls = impl_->calls->calls_made();
  stats.messages = impl_->executor->messages();
  stats.bytes_sent = impl_->executor->bytes_sent();
  for (const Mesh::Member& member : impl_->mesh.members()) {
    if (member.direct != nullptr) stats.direct_bytes += member.direct->in_place_bytes();
    if (member.transfer != nullptr) {
      stats.direct_bytes += member.transfer->in_place_bytes();
      stats.link_bytes += member.transfer->held_bytes();
    }
  }
  stats.sleeps = impl_->driver->sleeps();
  stats.staged_calls = impl_->devices->calls();
  stats.staged_bytes = impl_->devices->bytes();
  return stats;
}

Worker& Communicator::worker() { return impl_->mesh.worker(); }

}  // namespace baton
