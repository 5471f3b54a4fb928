// The C interface: lists and transfers.
#include <optional>

#include "capi/agent_handle.h"

using namespace baton::capi;
using baton::kvtransfer::AgentListId;
using baton::kvtransfer::AgentTransferId;
using baton::kvtransfer::AgentTransferState;

namespace {

int32_t result_of_transfer(const absl::Status& status, baton_error* error) {
  return result_of(status, error, About::kTransfer);
}

template <typename Span>
int32_t prepare(baton_agent* agent, const char* remote, int32_t memory, Span list, baton_list* out,
                baton_error* error) {
  return guarded(agent, error, [&] {
    return give_id(
        [&] {
          return remote == nullptr ? agent->agent->prepare_local(list, kind(memory))
                                   : agent->agent->prepare_remote(remote, list, kind(memory));
        },
        out);
  });
}

}  // namespace

extern "C" {

int32_t baton_list_prepare(baton_agent* agent, const char* remote, int32_t memory,
                           const baton_descriptor* list, size_t count, baton_list* out,
                           baton_error* error) {
  give_nothing(out);
  if (is_missing(list, count)) return missing(error);
  return prepare(agent, remote, memory, descriptors(list, count), out, error);
}

int32_t baton_list_prepare_strided(baton_agent* agent, const char* remote, int32_t memory,
                                   const baton_strided* rows, size_t count, baton_list* out,
                                   baton_error* error) {
  give_nothing(out);
  if (is_missing(rows, count)) return missing(error);
  return prepare(agent, remote, memory, baton::capi::rows(rows, count), out, error);
}

int32_t baton_list_register(baton_agent* agent, int32_t memory, const baton_strided* rows,
                            size_t count, baton_list* out, baton_error* error) {
  give_nothing(out);
  if (is_missing(rows, count)) return missing(error);
  return guarded(agent, error, [&] {
    const auto list = agent->agent->register_rows(baton::capi::rows(rows, count), kind(memory));
    if (list.ok() && out != nullptr) *out = list->value;
    if (list.ok() && out == nullptr) agent->agent->release_list(*list).IgnoreError();
    return list.status();
  });
}

int32_t baton_list_release(baton_agent* agent, baton_list list, baton_error* error) {
  return guarded(agent, error, [&] { return agent->agent->release_list(AgentListId{list}); });
}

int32_t baton_transfer_make(baton_agent* agent, int32_t op, baton_list local,
                            const int64_t* local_indices, size_t local_count, baton_list remote,
                            const int64_t* remote_indices, size_t remote_count, const void* message,
                            size_t message_size, baton_transfer* out, baton_error* error) {
  give_nothing(out);
  const std::optional<baton::Op> which = op_of(op);
  if (!which) return no_such_op(error);
  if (is_missing(local_indices, local_count) || is_missing(remote_indices, remote_count) ||
      is_missing(message, message_size)) {
    return missing(error);
  }
  return guarded(agent, error, [&] {
    return give_id(
        [&] {
          return agent->agent->make_transfer(
              *which, AgentListId{local}, {local_indices, local_count}, AgentListId{remote},
              {remote_indices, remote_count}, view(message, message_size));
        },
        out);
  });
}

int32_t baton_transfer_make_direct(baton_agent* agent, int32_t op, int32_t memory,
                                   const baton_descriptor* local, size_t local_count,
                                   const baton_descriptor* remote, size_t remote_count,
                                   const char* remote_agent, const void* message,
                                   size_t message_size, baton_transfer* out, baton_error* error) {
  return baton_transfer_make_between(agent, op, BATON_DRAM, local, local_count, memory, remote,
                                     remote_count, remote_agent, message, message_size, out, error);
}

int32_t baton_transfer_make_between(baton_agent* agent, int32_t op, int32_t local_memory,
                                    const baton_descriptor* local, size_t local_count,
                                    int32_t remote_memory, const baton_descriptor* remote,
                                    size_t remote_count, const char* remote_agent,
                                    const void* message, size_t message_size, baton_transfer* out,
                                    baton_error* error) {
  give_nothing(out);
  const std::optional<baton::Op> which = op_of(op);
  if (!which) return no_such_op(error);
  if (is_missing(local, local_count) || is_missing(remote, remote_count) ||
      is_missing(message, message_size)) {
    return missing(error);
  }
  return guarded(agent, error, [&] {
    return give_id(
        [&] {
          return agent->agent->make_transfer(*which, descriptors(local, local_count),
                                             descriptors(remote, remote_count), view(remote_agent),
                                             view(message, message_size), kind(remote_memory),
                                             kind(local_memory));
        },
        out);
  });
}

int32_t baton_transfer_post(baton_agent* agent, baton_transfer transfer, const void* message,
                            size_t message_size, baton_error* error) {
  if (message != nullptr && is_missing(message, message_size)) return missing(error);
  return guarded(agent, error, [&] {
    const std::string_view text = view(message, message_size);
    return result_of_transfer(
        agent->agent->post(AgentTransferId{transfer}, message == nullptr ? nullptr : &text), error);
  });
}

int32_t baton_transfer_state(baton_agent* agent, baton_transfer transfer, baton_error* error) {
  return guarded(agent, error, [&] {
    const auto outcome = agent->agent->outcome(AgentTransferId{transfer});
    if (!outcome.ok()) return result_of(outcome.status(), error);
    if (outcome->state == AgentTransferState::kRunning) return int32_t{BATON_IN_PROGRESS};
    return result_of_transfer(outcome->status, error);
  });
}

int32_t baton_transfer_wait(baton_agent* agent, baton_transfer transfer, int64_t timeout,
                            baton_error* error) {
  return guarded(agent, error, [&] {
    return result_of_transfer(agent->agent->wait(AgentTransferId{transfer}, timeout_of(timeout)),
                              error);
  });
}

int32_t baton_transfer_run(baton_agent* agent, baton_transfer transfer, int64_t timeout,
                           baton_error* error) {
  return guarded(agent, error, [&] {
    return result_of_transfer(agent->agent->run(AgentTransferId{transfer}, timeout_of(timeout)),
                              error);
  });
}

int32_t baton_transfer_abort(baton_agent* agent, baton_transfer transfer, baton_error* error) {
  return guarded(agent, error, [&] { return agent->agent->abort(AgentTransferId{transfer}); });
}

int32_t baton_transfer_local_free(baton_agent* agent, baton_transfer transfer, baton_error* error) {
  return guarded(agent, error, [&] {
    const absl::StatusOr<bool> free = agent->agent->local_free(AgentTransferId{transfer});
    if (free.ok() && !*free) return int32_t{BATON_IN_PROGRESS};
    return result_of(free.status(), error);
  });
}

int32_t baton_transfer_release(baton_agent* agent, baton_transfer transfer, int64_t timeout,
                               baton_error* error) {
  return guarded(agent, error, [&] {
    return agent->agent->release(AgentTransferId{transfer}, timeout_of(timeout));
  });
}

void baton_transfer_abandon(baton_agent* agent, baton_transfer transfer) {
  guarded(agent, nullptr, [&] { agent->agent->abandon(AgentTransferId{transfer}); });
}

int32_t baton_transfer_telemetry(const baton_agent* agent, baton_transfer transfer,
                                 baton_telemetry* out, baton_error* error) {
  return guarded(agent, error, [&] {
    const auto now = agent->agent->telemetry(AgentTransferId{transfer});
    if (!now.ok()) return result_of_transfer(now.status(), error);
    baton_telemetry all{};
    all.start_ns = now->start.count();
    all.post_ns = now->post_duration.count();
    all.transfer_ns = now->transfer_duration.count();
    all.bytes = now->bytes;
    all.descriptors = now->descriptors;
    return give_sized(all, out, "out: set its size to sizeof(baton_telemetry)", error);
  });
}

}  // extern "C"
