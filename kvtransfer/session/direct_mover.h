// A session whose blocks are read where they lie, into where they belong: of two engines whose
// caches a plan goes between (kvtransfer/agent_kv.h), however they differ in block size, order and
// ranks. What was read is checked in place, by the checksums that prefill took
// (kvtransfer/kv_checksums.h).
//
// A cache is said in JSON, alike to other engines and here:
//
//   {"identity": "...", "ranks": 2, "rows": [[address, bytes, device, stride, blocks], ...],
//    "kinds": [packing, ...], "layers": [0, 0, 1, ...]}
//
// `rows`: of each layer a block's bytes and where they begin; `layers`: which of the kinds
// (kvtransfer/kv_packing.h) packs each; `identity`: at most 128 bytes, equal where caches hold the
// same numbers. Blocks of a peer that names no kinds are like ours. Other keys are told to peers as
// they are. Not told are what is this worker's: "groups": of each layer the number of its run of
// blocks in an order; "rank", "stage", "heads": KvWorker; "lease": seconds.
#pragma once

#include <memory>
#include <string_view>

#include "absl/status/statusor.h"
#include "kvtransfer/kv_session.h"

namespace baton::kvtransfer::session {

// Over options.agent, with which the memory is registered. InvalidArgument: what is missing in the
// cache, or makes no sense.
absl::StatusOr<std::unique_ptr<KvSession>> make_direct_session(std::string_view cache,
                                                               KvSessionOptions options);

}  // namespace baton::kvtransfer::session
