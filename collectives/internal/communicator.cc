// The public calls: arguments put together, and handed to the implementation.
#include "collectives/communicator.h"

#include "absl/strings/str_format.h"
#include "collectives/internal/communicator_impl.h"

namespace baton {

Communicator::Communicator(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Communicator::~Communicator() {
  if (made_in_ != getpid()) (void)impl_.release();  // the parent's, and its threads are not here
}

absl::StatusOr<std::unique_ptr<Communicator>> Communicator::create(CommunicatorOptions options) {
  if (options.ranks < 1 || options.ranks > 4096 || options.rank < 0 ||
      options.rank >= options.ranks) {
    return absl::InvalidArgumentError(
        absl::StrFormat("rank %d of %d is out of range: ranks count from 0, and there may be 4096",
                        options.rank, options.ranks));
  }
  auto impl = std::make_unique<Impl>(std::move(options));
  if (absl::Status status = impl->start(); !status.ok()) return status;
  return std::unique_ptr<Communicator>(new Communicator(std::move(impl)));
}

int Communicator::rank() const { return impl_->options.rank; }
int Communicator::ranks() const { return impl_->options.ranks; }

absl::StatusOr<CommBuffer> Communicator::allocate(size_t bytes) { return impl_->allocate(bytes); }
void Communicator::free(const CommBuffer& buffer) { impl_->free(buffer); }

absl::StatusOr<Work> Communicator::all_reduce_async(const void* in, void* out, size_t count,
                                                    DataType type, ReduceOp op,
                                                    const CallOptions& options) {
  return impl_->starter->begin({Collective::kAllReduce, in, out, count, type, op, 0, options});
}

absl::StatusOr<Work> Communicator::reduce_scatter_async(const void* in, void* out, size_t count,
                                                        DataType type, ReduceOp op,
                                                        const CallOptions& options) {
  return impl_->starter->begin({Collective::kReduceScatter, in, out, count, type, op, 0, options});
}

absl::StatusOr<Work> Communicator::all_gather_async(const void* in, void* out, size_t count,
                                                    DataType type, const CallOptions& options) {
  return impl_->starter->begin(
      {Collective::kAllGather, in, out, count, type, ReduceOp::kSum, 0, options});
}

absl::StatusOr<Work> Communicator::broadcast_async(const void* in, void* out, size_t count,
                                                   DataType type, int root,
                                                   const CallOptions& options) {
  return impl_->starter->begin(
      {Collective::kBroadcast, in, out, count, type, ReduceOp::kSum, root, options});
}

absl::StatusOr<Work> Communicator::reduce_async(const void* in, void* out, size_t count,
                                                DataType type, ReduceOp op, int root,
                                                const CallOptions& options) {
  return impl_->starter->begin({Collective::kReduce, in, out, count, type, op, root, options});
}

absl::StatusOr<Work> Communicator::all_to_all_async(const void* in, void* out, size_t count,
                                                    DataType type, const CallOptions& options) {
  return impl_->starter->begin(
      {Collective::kAllToAll, in, out, count, type, ReduceOp::kSum, 0, options});
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
      {Collective::kBarrier, nullptr, nullptr, 0, DataType::kU8, ReduceOp::kSum, 0, options});
}

namespace {
absl::Status end_of(Communicator& comm, const absl::StatusOr<Work>& work) {
  return work.ok() ? comm.wait(*work) : work.status();
}
}  // namespace

absl::Status Communicator::all_reduce(const void* in, void* out, size_t count, DataType type,
                                      ReduceOp op, const CallOptions& options) {
  return impl_->starter->run({Collective::kAllReduce, in, out, count, type, op, 0, options});
}
absl::Status Communicator::reduce_scatter(const void* in, void* out, size_t count, DataType type,
                                          ReduceOp op, const CallOptions& options) {
  return impl_->starter->run({Collective::kReduceScatter, in, out, count, type, op, 0, options});
}
absl::Status Communicator::all_gather(const void* in, void* out, size_t count, DataType type,
                                      const CallOptions& options) {
  return impl_->starter->run(
      {Collective::kAllGather, in, out, count, type, ReduceOp::kSum, 0, options});
}
absl::Status Communicator::broadcast(const void* in, void* out, size_t count, DataType type,
                                     int root, const CallOptions& options) {
  return impl_->starter->run(
      {Collective::kBroadcast, in, out, count, type, ReduceOp::kSum, root, options});
}
absl::Status Communicator::reduce(const void* in, void* out, size_t count, DataType type,
                                  ReduceOp op, int root, const CallOptions& options) {
  return impl_->starter->run({Collective::kReduce, in, out, count, type, op, root, options});
}
absl::Status Communicator::all_to_all(const void* in, void* out, size_t count, DataType type,
                                      const CallOptions& options) {
  return impl_->starter->run(
      {Collective::kAllToAll, in, out, count, type, ReduceOp::kSum, 0, options});
}
absl::Status Communicator::send(const void* in, size_t count, DataType type, int to,
                                const CallOptions& options) {
  return end_of(*this, send_async(in, count, type, to, options));
}
absl::Status Communicator::receive(void* out, size_t count, DataType type, int from,
                                   const CallOptions& options) {
  return end_of(*this, receive_async(out, count, type, from, options));
}
absl::Status Communicator::barrier(const CallOptions& options) {
  return impl_->starter->run(
      {Collective::kBarrier, nullptr, nullptr, 0, DataType::kU8, ReduceOp::kSum, 0, options});
}

absl::Status Communicator::wait(Work work) { return impl_->driver->wait(work); }
std::optional<absl::Status> Communicator::test(Work work) { return impl_->test(work); }
bool Communicator::progress() { return impl_->progress(); }

void Communicator::abort(const absl::Status& why) { impl_->abort(why); }

absl::Status Communicator::status() const {
  if (!impl_->failure.is_broken()) return absl::OkStatus();
  std::lock_guard lock(impl_->mutex);
  return impl_->failure.broken();
}

std::vector<int> Communicator::lost_ranks() const { return impl_->lost_ranks(); }

absl::StatusOr<std::unique_ptr<Communicator>> Communicator::shrink() { return impl_->shrink(); }

std::string Communicator::explain(Collective collective, size_t bytes,
                                  const CallOptions& options) const {
  return impl_->explain(collective, bytes, options);
}

std::string Communicator::routes() const { return impl_->routes(); }
std::string Communicator::flight_record() const { return impl_->recorder.text(); }
CommunicatorStats Communicator::stats() const { return impl_->stats(); }
Worker& Communicator::worker() { return impl_->mesh.worker(); }

}  // namespace baton
