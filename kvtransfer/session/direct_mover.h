// A session whose blocks are read where they lie, into where they belong: of two engines whose
// caches a plan goes between (kvtransfer/agent_kv.h), however they differ in block size, order and
// ranks. What was read is checked in place, by the checksums that prefill took
// (kvtransfer/kv_checksums.h).
//
// The JSON of a cache is what baton_kv_session_create() takes (capi/include/baton/baton.h); kinds
// are kvtransfer/kv_packing.h's, "rank", "stage" and "heads" a KvWorker's. Blocks of a peer that
// names no kinds are like ours.
#pragma once

#include <memory>
#include <string_view>

#include "absl/status/statusor.h"
#include "kvtransfer/agent_kv.h"
#include "kvtransfer/kv_session.h"
#include "kvtransfer/session/kv_mover.h"

namespace baton::kvtransfer::session {

// Over options.agent, with which the memory is registered. InvalidArgument: what is missing in the
// cache, or makes no sense.
absl::StatusOr<std::unique_ptr<KvSession>> make_direct_session(std::string_view cache,
                                                               KvSessionOptions options);

// For a cache that is known by its placement, as connectors have it. No checksums are taken: a read
// counts when prefill has said that its blocks were still held then.
std::unique_ptr<KvMover> make_direct_mover(Agent& agent, const KvPlacement& cache);

}  // namespace baton::kvtransfer::session
