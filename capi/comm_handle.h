// baton_endpoint and baton_comm, defined.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "absl/functional/function_ref.h"
#include "absl/strings/match.h"
#include "capi/agent_handle.h"
#include "capi/include/baton/collectives.h"
#include "collectives/communicator.h"
#include "collectives/rendezvous.h"
#include "transport/base/threads/forks.h"

struct baton_endpoint {
  const baton::base::MadeHere made_here;
  std::shared_ptr<baton::Endpoint> endpoint;
  std::optional<baton::ClusterKey> key;  // nullopt: the user's
  std::mutex mutex;
  std::map<void*, baton::CommBuffer> buffers;  // that were allocated
};

struct baton_comm {
  const baton::base::MadeHere made_here;
  uint64_t serial = 0;  // of this handle in this process: the upper part of its works' numbers
  std::unique_ptr<baton::collectives::RendezvousServer> serves;
  std::unique_ptr<baton::Communicator> comm;
};

namespace baton::capi {

// How a call, and with it the communicator, failed: BATON_ERR_TIMEOUT would be the end of a wait.
inline absl::Status ended(const absl::Status& status) {
  return absl::IsDeadlineExceeded(status) || absl::IsAborted(status)
             ? absl::CancelledError(status.message())
             : status;
}

// The same after a wait, which may also have run out of time by itself.
inline absl::Status ended_by(const absl::Status& waited) {
  const bool runs =
      absl::IsDeadlineExceeded(waited) && absl::StrContains(waited.message(), "still runs");
  return runs ? waited : ended(waited);
}

// body(endpoint)
template <typename Body>
int32_t with(const baton_endpoint* handle, baton_error* error, Body&& body) {
  return with_own(
      handle, "endpoint is NULL: pass what baton_endpoint_open() made",
      "the endpoint belongs to the process that this one was forked from: open another one", error,
      [&] { return body(*handle->endpoint); });
}

// body(communicator)
template <typename Body>
int32_t with(const baton_comm* handle, baton_error* error, Body&& body) {
  return with_own(
      handle, "comm is NULL: pass what baton_comm_meet() or baton_comm_create() made",
      "the communicator belongs to the process that this one was forked from: make another one",
      error, [&] { return body(*handle->comm); });
}

// A work's number: its communicator's above, its own below, so that no two calls of this process
// have the same.
inline constexpr int kSequenceBits = 44;
inline baton_work number_of(const baton_comm& handle, Work work) {
  return handle.serial << kSequenceBits | work.sequence;
}

// The fields that all structs of calls share.
struct Starting {
  int64_t timeout;
  uint32_t flags;
  baton_on_end on_end;
  void* context;
};
// begin(options), which starts a call of this communicator's: its number to `work`.
int32_t start_call(const baton_comm& comm, const Starting& starting, baton_work* work,
                   baton_error* error,
                   absl::FunctionRef<absl::StatusOr<Work>(const CallOptions&)> begin);

// The collective of a baton_call_kind; nothing if the kind is not a collective.
std::optional<Collective> collective_of(int32_t kind);
absl::Status no_such_kind(int32_t kind);

}  // namespace baton::capi
