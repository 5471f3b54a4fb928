// The C interface: calls of communicators, from their start to the moment when their end is told.
#include <memory>
#include <optional>

#include "absl/strings/str_format.h"
#include "capi/comm_handle.h"

using baton::CallOptions;
using baton::Communicator;
using baton::DataType;
using baton::ReduceOp;
using baton::Work;
using namespace baton::capi;

namespace {

std::optional<Work> work_of(const baton_comm& handle, baton_work work) {
  const uint64_t sequence = work & ((uint64_t{1} << kSequenceBits) - 1);
  if (number_of(handle, Work{sequence}) != work) return std::nullopt;
  return Work{sequence};
}
absl::Status foreign(baton_work work) {
  return absl::NotFoundError(
      absl::StrFormat("%d is no work of this communicator: baton_comm_start() gives them", work));
}

absl::StatusOr<Work> no_group(baton_work group) {
  return absl::InvalidArgumentError(absl::StrFormat(
      "%d is no group of this communicator: baton_comm_group_begin() gives them", group));
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
    case BATON_SCATTER:
      return group.scatter_async(call.in, call.out, call.count, type, call.peer, options);
    case BATON_GATHER:
      return group.gather_async(call.in, call.out, call.count, type, call.peer, options);
    case BATON_ALL_GATHER_V:
      return group.all_gather_v_async(
          call.in, call.out_counts == nullptr ? 0 : call.out_counts[group.rank()], call.out,
          list(call.out_counts), list(call.out_offsets), type, options);
    case BATON_REDUCE_SCATTER_V:
      return group.reduce_scatter_v_async(call.in, list(call.in_counts), list(call.in_offsets),
                                          call.out, type, op, options);
    case BATON_ALL_TO_ALL_V:
      return group.all_to_all_v_async(call.in, list(call.in_counts), list(call.in_offsets),
                                      call.out, list(call.out_counts), list(call.out_offsets), type,
                                      options);
    default:
      return no_such_kind(call.kind);
  }
}

// The callback's arguments, kept until it is called.
struct OnEnd {
  baton_on_end call;
  void* context;
  const baton_comm& handle;
};
void call_on_end(void* context, Work work, const absl::Status& status) {
  const std::unique_ptr<OnEnd> on_end(static_cast<OnEnd*>(context));
  baton_error error = BATON_ERROR_INIT;
  const int32_t result = result_of(ended(status), &error);
  on_end->call(on_end->context, number_of(on_end->handle, work), result, error.text);
}

}  // namespace

std::optional<baton::Collective> baton::capi::collective_of(int32_t kind) {
  switch (kind) {
    case BATON_ALL_REDUCE:
      return Collective::kAllReduce;
    case BATON_REDUCE_SCATTER:
    case BATON_REDUCE_SCATTER_V:
      return Collective::kReduceScatter;
    case BATON_ALL_GATHER:
    case BATON_ALL_GATHER_V:
      return Collective::kAllGather;
    case BATON_SCATTER:
      return Collective::kScatter;
    case BATON_GATHER:
      return Collective::kGather;
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

int32_t baton::capi::start_call(const baton_comm& comm, const Starting& starting, baton_work* work,
                                baton_error* error,
                                absl::FunctionRef<absl::StatusOr<Work>(const CallOptions&)> begin) {
  CallOptions options;
  options.detached = (starting.flags & BATON_CALL_DETACHED) != 0;
  if (work == nullptr && !options.detached) {
    return invalid("work is NULL: pass the address for the number, or BATON_CALL_DETACHED", error);
  }
  set_time(starting.timeout, options.timeout);
  std::unique_ptr<OnEnd> on_end;
  if (starting.on_end != nullptr) {
    on_end = std::make_unique<OnEnd>(OnEnd{starting.on_end, starting.context, comm});
    options.on_end = call_on_end;
    options.context = on_end.get();
  }
  const auto started = begin(options);
  if (started.ok()) {
    (void)on_end.release();  // its own by now
    if (work != nullptr) *work = number_of(comm, *started);
  }
  return result_of(ended(started.status()), error);
}

absl::Status baton::capi::no_such_kind(int32_t kind) {
  return absl::InvalidArgumentError(
      absl::StrFormat("kind %d is not one that this library knows: see baton_call_kind", kind));
}

extern "C" {

int32_t baton_comm_start(baton_comm* comm, const baton_call* call, baton_work* work,
                         baton_error* error) {
  give_nothing(work);
  baton_call all = BATON_CALL_INIT;
  if (!read_sized(call, all)) {
    return invalid("call: set it to BATON_CALL_INIT first", error);
  }
  if (!collective_of(all.kind)) return result_of(no_such_kind(all.kind), error);
  return with(comm, error, [&](Communicator& group) {
    const Starting starting{all.timeout, all.flags, all.on_end, all.context};
    return start_call(*comm, starting, work, error, [&](const CallOptions& common) {
      CallOptions options = common;
      if ((all.flags & (BATON_CALL_ORDERED | BATON_CALL_UNORDERED)) != 0) {
        options.ordered = (all.flags & BATON_CALL_ORDERED) != 0;
      }
      options.tag = all.tag;
      options.factor = all.factor;
      if (all.after != nullptr) options.after = {all.after->device, all.after->handle};
      if (all.release != nullptr) options.release = {all.release->device, all.release->handle};
      if (all.group != 0) {
        const auto known = work_of(*comm, all.group);
        if (!known) return no_group(all.group);
        options.group = *known;
      }
      return start(group, all, options);
    });
  });
}

int32_t baton_work_wait(baton_comm* comm, baton_work work, int64_t timeout, baton_error* error) {
  return with(comm, error, [&](Communicator& group) {
    const auto known = work_of(*comm, work);
    if (!known) return foreign(work);
    return ended_by(group.wait(*known, timeout_of(timeout)));
  });
}

int32_t baton_comm_group_begin(baton_comm* comm, baton_work* group, baton_error* error) {
  if (!cleared(group)) return invalid("group is NULL: pass the address for the number", error);
  return with(comm, error, [&](Communicator& of) {
    const auto begun = of.group_begin();
    if (begun.ok()) *group = number_of(*comm, *begun);
    return ended(begun.status());
  });
}

int32_t baton_comm_group_end(baton_comm* comm, baton_work group, baton_error* error) {
  return with(comm, error, [&](Communicator& of) {
    const auto known = work_of(*comm, group);
    return known ? of.group_end(*known) : no_group(group).status();
  });
}

int32_t baton_work_hold(baton_comm* comm, baton_work work, const baton_stream* stream,
                        baton_error* error) {
  if (stream == nullptr) return invalid("stream is NULL: pass what the device's stream is", error);
  return with(comm, error, [&](Communicator& group) {
    const auto known = work_of(*comm, work);
    if (!known) return foreign(work);
    return ended(group.hold(*known, {stream->device, stream->handle}));
  });
}

int32_t baton_work_test(baton_comm* comm, baton_work work, baton_error* error) {
  return with(comm, error, [&](Communicator& group) {
    const auto known = work_of(*comm, work);
    if (!known) return result_of(foreign(work), error);
    const auto result = group.test(*known);
    return result ? result_of(ended(*result), error) : int32_t{BATON_IN_PROGRESS};
  });
}

int32_t baton_work_source(const baton_comm* comm, baton_work work, int32_t* rank,
                          baton_error* error) {
  if (rank == nullptr) return invalid("rank is NULL: pass the address for the number", error);
  *rank = -1;
  return with(comm, error, [&](Communicator& group) {
    const auto known = work_of(*comm, work);
    if (!known) return foreign(work);
    *rank = group.source_of(*known);
    if (*rank >= 0) return absl::OkStatus();
    return absl::NotFoundError(
        absl::StrFormat("work %d has no source: it is no receive, has not ended well yet, or more "
                        "than 1,024 calls came after it",
                        work));
  });
}

}  // extern "C"
