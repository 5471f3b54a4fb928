// The C interface: calls of communicators, from their start to the moment when their end is told.
#include <algorithm>
#include <chrono>
#include <optional>
#include <thread>

#include "absl/strings/str_format.h"
#include "capi/comm_handle.h"

using baton::CallOptions;
using baton::Communicator;
using baton::DataType;
using baton::ReduceOp;
using baton::Time;
using baton::Work;
using baton::capi::ended;
using baton::capi::give_nothing;
using baton::capi::invalid;
using baton::capi::result_of;
using baton::capi::with;

namespace {

// A work's number: its communicator's above, its own below, so that no two calls of this process
// have the same.
constexpr int kSequenceBits = 44;
constexpr uint64_t kSequence = (uint64_t{1} << kSequenceBits) - 1;

baton_work number_of(const baton_comm& handle, Work work) {
  return handle.serial << kSequenceBits | (work.sequence & kSequence);
}
std::optional<Work> work_of(const baton_comm& handle, baton_work work) {
  if (work >> kSequenceBits != (handle.serial << kSequenceBits >> kSequenceBits)) {
    return std::nullopt;
  }
  return Work{work & kSequence};
}
int32_t foreign(baton_work work, baton_error* error) {
  return result_of(absl::NotFoundError(absl::StrFormat(
                       "%d is no work of this communicator: baton_comm_start() gives them", work)),
                   error);
}

absl::StatusOr<Work> start(Communicator& group, const baton_call& call,
                           const CallOptions& options) {
  const auto ranks = static_cast<size_t>(group.ranks());
  const auto list = [&](const size_t* numbers) {
    return absl::Span<const size_t>(numbers, numbers == nullptr ? 0 : ranks);
  };
  // Numbers that are none are refused by the communicator, but for those that do not fit.
  const auto type = static_cast<DataType>(call.type < 0 || call.type > 255 ? 255 : call.type);
  const auto op = static_cast<ReduceOp>(call.op < 0 || call.op > 255 ? 255 : call.op);
  switch (call.kind) {
    case BATON_ALL_REDUCE:
      return group.all_reduce_async(call.in, call.out, call.count, type, op, options);
    case BATON_REDUCE_SCATTER:
      return group.reduce_scatter_async(call.in, call.out, call.count, type, op, options);
    case BATON_ALL_GATHER:
      return group.all_gather_async(call.in, call.out, call.count, type, options);
    case BATON_BROADCAST:
      return group.broadcast_async(call.in, call.out, call.count, type, call.peer, options);
    case BATON_REDUCE:
      return group.reduce_async(call.in, call.out, call.count, type, op, call.peer, options);
    case BATON_ALL_TO_ALL:
      return group.all_to_all_async(call.in, call.out, call.count, type, options);
    case BATON_BARRIER:
      return group.barrier_async(options);
    case BATON_SEND:
      return group.send_async(call.in, call.count, type, call.peer, options);
    case BATON_RECEIVE:
      return group.receive_async(call.out, call.count, type, call.peer, options);
    case BATON_ALL_TO_ALL_V:
      return group.all_to_all_v_async(call.in, list(call.in_counts), list(call.in_offsets),
                                      call.out, list(call.out_counts), list(call.out_offsets), type,
                                      options);
    default:
      return absl::InvalidArgumentError(absl::StrFormat(
          "kind %d is none that this library knows: see baton_call_kind", call.kind));
  }
}

// Until the call has ended; nullopt: `timeout` ran out.
std::optional<absl::Status> wait_for(Communicator& group, Work work, Time timeout) {
  if (timeout == baton::kNever) return group.wait(work);
  const auto start = std::chrono::steady_clock::now();
  for (int turn = 0;; ++turn) {
    if (auto result = group.test(work)) return result;
    if (turn % 16 != 0) continue;
    const auto waited = std::chrono::steady_clock::now() - start;
    if (waited >= timeout) return std::nullopt;
    if (waited > std::chrono::milliseconds(1)) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    } else if (waited > std::chrono::microseconds(50)) {
      std::this_thread::yield();
    }
  }
}

}  // namespace

std::optional<baton::Collective> baton::capi::collective_of(int32_t kind) {
  switch (kind) {
    case BATON_ALL_REDUCE:
      return Collective::kAllReduce;
    case BATON_REDUCE_SCATTER:
      return Collective::kReduceScatter;
    case BATON_ALL_GATHER:
      return Collective::kAllGather;
    case BATON_BROADCAST:
      return Collective::kBroadcast;
    case BATON_REDUCE:
      return Collective::kReduce;
    case BATON_ALL_TO_ALL:
    case BATON_ALL_TO_ALL_V:
      return Collective::kAllToAll;
    case BATON_BARRIER:
      return Collective::kBarrier;
    case BATON_SEND:
    case BATON_RECEIVE:
      return Collective::kSendReceive;
    default:
      return std::nullopt;
  }
}

int32_t baton::capi::no_such_kind(int32_t kind, baton_error* error) {
  return result_of(absl::InvalidArgumentError(absl::StrFormat(
                       "kind %d is none that this library knows: see baton_call_kind", kind)),
                   error);
}

extern "C" {

int32_t baton_comm_start(baton_comm* comm, const baton_call* call, baton_work* work,
                         baton_error* error) {
  give_nothing(work);
  baton_call all = BATON_CALL_INIT;
  if (!baton::capi::read_sized(call, all)) {
    return invalid("call: set it to BATON_CALL_INIT first", error);
  }
  if (work == nullptr) return invalid("work is NULL: pass the address for the number", error);
  if (!baton::capi::collective_of(all.kind)) return baton::capi::no_such_kind(all.kind, error);
  return with(comm, error, [&](Communicator& group) {
    CallOptions options;
    if ((all.flags & (BATON_CALL_ORDERED | BATON_CALL_UNORDERED)) != 0) {
      options.ordered = (all.flags & BATON_CALL_ORDERED) != 0;
    }
    if (all.timeout != 0) options.timeout = baton::capi::timeout_of(all.timeout);
    const auto started = start(group, all, options);
    if (started.ok()) *work = number_of(*comm, *started);
    return result_of(ended(started.status()), error);
  });
}

int32_t baton_work_wait(baton_comm* comm, baton_work work, int64_t timeout, baton_error* error) {
  return with(comm, error, [&](Communicator& group) {
    const auto known = work_of(*comm, work);
    if (!known) return foreign(work, error);
    const auto result = wait_for(group, *known, baton::capi::timeout_of(timeout));
    if (result) return result_of(ended(*result), error);
    return result_of(absl::DeadlineExceededError("the wait ran out of time; the call goes on"),
                     error);
  });
}

int32_t baton_work_test(baton_comm* comm, baton_work work, baton_error* error) {
  return with(comm, error, [&](Communicator& group) {
    const auto known = work_of(*comm, work);
    if (!known) return foreign(work, error);
    const auto result = group.test(*known);
    return result ? result_of(ended(*result), error) : int32_t{BATON_IN_PROGRESS};
  });
}

}  // extern "C"
