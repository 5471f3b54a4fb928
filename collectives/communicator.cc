// The public calls.
#include "collectives/communicator.h"

#include "absl/strings/str_cat.h"
#include "collectives/communicator_impl.h"

namespace baton {

Communicator::Communicator(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Communicator::~Communicator() = default;

absl::StatusOr<std::unique_ptr<Communicator>> Communicator::create(CommunicatorOptions options) {
  auto impl = std::make_unique<Impl>(std::move(options));
  if (absl::Status status = impl->start(); !status.ok()) return status;
  return std::unique_ptr<Communicator>(new Communicator(std::move(impl)));
}

int Communicator::rank() const { return impl_->options.rank; }
int Communicator::ranks() const { return impl_->options.ranks; }

absl::StatusOr<CommBuffer> Communicator::allocate(size_t bytes) {
  std::lock_guard lock(impl_->mutex);
  absl::StatusOr<Block> block = impl_->memory->allocate(std::max<size_t>(bytes, 64));
  if (!block.ok()) return block.status();
  if (absl::Status status = impl_->publish_regions(); !status.ok()) return status;
  size_t index = 0;
  while (index < impl_->buffers.size() && impl_->buffers[index].data != nullptr) ++index;
  if (index == impl_->buffers.size()) impl_->buffers.emplace_back();
  impl_->buffers[index] = *block;
  return CommBuffer{block->data, bytes, static_cast<uint32_t>(index)};
}

void Communicator::free(const CommBuffer& buffer) {
  std::lock_guard lock(impl_->mutex);
  if (buffer.index >= impl_->buffers.size()) return;
  Block& block = impl_->buffers[buffer.index];
  if (block.data == nullptr || block.data != buffer.data) return;
  impl_->memory->free(block);
  block = Block{};
}

absl::StatusOr<Work> Communicator::all_reduce_async(const void* in, void* out, size_t count,
                                                    DataType type, ReduceOp op,
                                                    const CallOptions& options) {
  return impl_->begin({Collective::kAllReduce, in, out, count, type, op, 0, options});
}

absl::StatusOr<Work> Communicator::reduce_scatter_async(const void* in, void* out, size_t count,
                                                        DataType type, ReduceOp op,
                                                        const CallOptions& options) {
  return impl_->begin({Collective::kReduceScatter, in, out, count, type, op, 0, options});
}

absl::StatusOr<Work> Communicator::all_gather_async(const void* in, void* out, size_t count,
                                                    DataType type, const CallOptions& options) {
  return impl_->begin({Collective::kAllGather, in, out, count, type, ReduceOp::kSum, 0, options});
}

absl::StatusOr<Work> Communicator::broadcast_async(const void* in, void* out, size_t count,
                                                   DataType type, int root,
                                                   const CallOptions& options) {
  return impl_->begin(
      {Collective::kBroadcast, in, out, count, type, ReduceOp::kSum, root, options});
}

absl::StatusOr<Work> Communicator::reduce_async(const void* in, void* out, size_t count,
                                                DataType type, ReduceOp op, int root,
                                                const CallOptions& options) {
  return impl_->begin({Collective::kReduce, in, out, count, type, op, root, options});
}

absl::StatusOr<Work> Communicator::all_to_all_async(const void* in, void* out, size_t count,
                                                    DataType type, const CallOptions& options) {
  return impl_->begin({Collective::kAllToAll, in, out, count, type, ReduceOp::kSum, 0, options});
}

absl::StatusOr<Work> Communicator::all_to_all_v_async(
    const void* in, absl::Span<const size_t> send_counts, absl::Span<const size_t> send_offsets,
    void* out, absl::Span<const size_t> receive_counts, absl::Span<const size_t> receive_offsets,
    DataType type, const CallOptions& options) {
  return impl_->begin_all_to_all_v(static_cast<const std::byte*>(in), send_counts, send_offsets,
                                   static_cast<std::byte*>(out), receive_counts, receive_offsets,
                                   type, options);
}

absl::StatusOr<Work> Communicator::send_async(const void* in, size_t count, DataType type, int to,
                                              const CallOptions& options) {
  return impl_->begin_point_to_point(true, const_cast<void*>(in), count, type, to, options);
}

absl::StatusOr<Work> Communicator::receive_async(void* out, size_t count, DataType type, int from,
                                                 const CallOptions& options) {
  return impl_->begin_point_to_point(false, out, count, type, from, options);
}

absl::StatusOr<Work> Communicator::barrier_async(const CallOptions& options) {
  return impl_->begin(
      {Collective::kBarrier, nullptr, nullptr, 0, DataType::kU8, ReduceOp::kSum, 0, options});
}

namespace {
absl::Status end_of(Communicator& comm, const absl::StatusOr<Work>& work) {
  return work.ok() ? comm.wait(*work) : work.status();
}
}  // namespace

absl::Status Communicator::all_reduce(const void* in, void* out, size_t count, DataType type,
                                      ReduceOp op, const CallOptions& options) {
  return impl_->run({Collective::kAllReduce, in, out, count, type, op, 0, options});
}
absl::Status Communicator::reduce_scatter(const void* in, void* out, size_t count, DataType type,
                                          ReduceOp op, const CallOptions& options) {
  return impl_->run({Collective::kReduceScatter, in, out, count, type, op, 0, options});
}
absl::Status Communicator::all_gather(const void* in, void* out, size_t count, DataType type,
                                      const CallOptions& options) {
  return impl_->run({Collective::kAllGather, in, out, count, type, ReduceOp::kSum, 0, options});
}
absl::Status Communicator::broadcast(const void* in, void* out, size_t count, DataType type,
                                     int root, const CallOptions& options) {
  return impl_->run({Collective::kBroadcast, in, out, count, type, ReduceOp::kSum, root, options});
}
absl::Status Communicator::reduce(const void* in, void* out, size_t count, DataType type,
                                  ReduceOp op, int root, const CallOptions& options) {
  return impl_->run({Collective::kReduce, in, out, count, type, op, root, options});
}
absl::Status Communicator::all_to_all(const void* in, void* out, size_t count, DataType type,
                                      const CallOptions& options) {
  return impl_->run({Collective::kAllToAll, in, out, count, type, ReduceOp::kSum, 0, options});
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
  return impl_->run(
      {Collective::kBarrier, nullptr, nullptr, 0, DataType::kU8, ReduceOp::kSum, 0, options});
}

absl::Status Communicator::wait(Work work) { return impl_->wait(work); }

std::optional<absl::Status> Communicator::test(Work work) {
  std::lock_guard lock(impl_->mutex);
  if (!impl_->background.joinable()) {
    impl_->advance();
    impl_->tick_sometimes();
  }
  return impl_->reap(work);
}

bool Communicator::progress() {
  std::lock_guard lock(impl_->mutex);
  const bool any = impl_->advance();
  impl_->tick_sometimes();
  return any;
}

void Communicator::abort(absl::Status why) {
  std::lock_guard lock(impl_->mutex);
  impl_->fail(absl::Status(why.ok() ? absl::StatusCode::kAborted : why.code(),
                           absl::StrCat("rank ", impl_->rank, " called abort(): ", why.message())),
              impl_->rank, true);
}

absl::Status Communicator::status() const {
  if (!impl_->is_broken.load(std::memory_order_acquire)) return absl::OkStatus();
  std::lock_guard lock(impl_->mutex);
  return impl_->broken;
}

std::vector<int> Communicator::lost_ranks() const {
  std::lock_guard lock(impl_->mutex);
  std::vector<int> lost;
  for (uint32_t r = 0; r < impl_->ranks; ++r) {
    if (impl_->members[r].lost) lost.push_back(static_cast<int>(r));
  }
  return lost;
}

absl::StatusOr<std::unique_ptr<Communicator>> Communicator::shrink() { return impl_->shrink(); }

std::string Communicator::explain(Collective collective, size_t bytes,
                                  const CallOptions& options) const {
  std::lock_guard lock(impl_->mutex);
  return impl_->explain(collective, bytes, options);
}

std::string Communicator::routes() const {
  std::lock_guard lock(impl_->mutex);
  std::string out;
  for (const Impl::Member& member : impl_->members) {
    if (member.link != nullptr)
      absl::StrAppend(&out, member.label, ": ", member.link->route(), "\n");
  }
  return out;
}

std::string Communicator::flight_record() const { return impl_->recorder->text(); }

CommunicatorStats Communicator::stats() const {
  std::lock_guard lock(impl_->mutex);
  CommunicatorStats stats;
  stats.calls = impl_->calls_made.load();
  stats.messages = impl_->executor->messages();
  stats.bytes_sent = impl_->executor->bytes_sent();
  for (const Impl::Member& member : impl_->members) {
    if (member.direct != nullptr) stats.direct_bytes += member.direct->in_place_bytes();
  }
  stats.sleeps = impl_->sleeps.load();
  return stats;
}

Worker& Communicator::worker() { return *impl_->worker; }

}  // namespace baton
