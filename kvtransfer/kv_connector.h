// The KvConnector: all that a serving engine sees of Baton. Modelled on the connectors of vLLM.
//
// A request's life, from the decode worker's side first:
//
//   decode                                       prefill
//   start_load(request, blocks)  --- asks --->   next_job(job)
//                                                for each chunk, for each layer:
//   layers_loaded(id) grows      <-- pages ---     save_layer(id, layer, blocks)
//   wait_for_layer(id, l) in layer l             finish_job(id)
//   end_load(id)                                 is_saved(id): the blocks are free again
//
// The decode worker allocates its blocks first; pages are written straight into them, layer by
// layer, while prefill computes the next layer. Nothing here depends on the order of arrival.
//
// Threads: one engine thread calls everything. Blocks named in a call stay pinned (neither freed
// nor written) until the call that the comment names says otherwise.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvtransfer/kv_layout.h"
#include "transport/clock.h"

namespace baton::kvtransfer {

using KvRequestId = uint64_t;  // chosen by the decode worker, unique in it

// Decode asks for the KV of tokens [first_token, tokens.size()).
struct KvLoad {
  KvRequestId id = 0;
  std::string prefill;           // address of the prefill worker, as its address() gave it
  std::vector<int32_t> tokens;   // from the start of the sequence
  uint32_t first_token = 0;      // KV before it is here already; a multiple of the block size
  std::vector<uint32_t> blocks;  // where the KV of [first_token, ...) goes, in order
  Time timeout = std::chrono::seconds(60);
};

// The same request, as the prefill worker sees it.
struct KvJob {
  uint64_t job = 0;         // this worker's number for it
  KvRequestId request = 0;  // decode's number for it, for timelines
  std::string decode;       // the asking worker's name, for messages
  std::vector<int32_t> tokens;
  uint32_t first_token = 0;  // send from here on
};

struct KvConnectorStats {
  uint64_t bytes_sent = 0;
  uint64_t bytes_loaded = 0;
  uint64_t loads_failed = 0;
  uint64_t jobs_failed = 0;
  std::string route;  // of the last peer, for people
};

class KvConnector {
 public:
  virtual ~KvConnector() = default;

  // --- both sides ------------------------------------------------------------------------------
  // Memory for the KV cache: registered, shared with peers, faulted in. Called once, before all
  // else. The layout's buffers one after the other, each aligned to 4096; owned by the connector.
  virtual absl::StatusOr<void*> allocate_cache(const KvLayout& layout) = 0;
  // How a peer reaches this worker: goes into KvLoad::prefill.
  virtual std::string address() const = 0;
  // Advances transfers; never blocks. Call it between steps and between layers.
  virtual void progress() = 0;
  // Sleeps until something may have changed, at most `timeout`. `fd` (or -1) also ends the sleep
  // when readable, so that an engine can wait for requests and pages at once.
  virtual void wait(Time timeout, int fd) = 0;
  virtual KvConnectorStats stats() const = 0;

  // --- decode ----------------------------------------------------------------------------------
  // Asks the prefill worker for a request's KV. Returns at once; what goes wrong later shows in
  // load_status(). The blocks are pinned until end_load() has returned true: a layer that is here
  // may be read, but what arrived may arrive once more.
  virtual absl::Status start_load(KvLoad load) = 0;
  // How many layers, counted from layer 0, are here completely.
  virtual uint32_t layers_loaded(KvRequestId id) = 0;
  // OK while under way and when complete; otherwise why the KV will never come (prefill died, timed
  // out, refused). The engine then prefills itself or gives up.
  virtual absl::Status load_status(KvRequestId id) = 0;
  // Returns when layer `layer` is here; drives progress meanwhile. load_status() where it fails.
  virtual absl::Status wait_for_layer(KvRequestId id, uint32_t layer) = 0;
  // Ends a load, complete or not: tells prefill to stop. True when no byte can arrive any more: the
  // blocks may be reused. False: not yet, call again later (they stay in quarantine).
  virtual bool end_load(KvRequestId id) = 0;

  // --- prefill ---------------------------------------------------------------------------------
  // The next request of a decode worker, if any.
  virtual std::optional<KvJob> next_job() = 0;
  // False once decode gave the job up or died: stop computing it.
  virtual bool is_wanted(uint64_t job) = 0;
  // These blocks of `layer` are computed: send them. `first_block` counts blocks of the sequence
  // (block i holds tokens [i * block_tokens, ...)). Only blocks at or after the job's first_token
  // are sent, each exactly once per layer: one that is named again is skipped, so hand over a block
  // when it is full (the last one: when the prompt ends). Cancelled once the job is not wanted.
  // Returns at once.
  virtual absl::Status save_layer(uint64_t job, uint32_t layer, uint32_t first_block,
                                  absl::Span<const uint32_t> blocks) = 0;
  // Everything was handed to save_layer(); or, with an error, nothing more will come. To be called
  // for every job that next_job() gave, wanted or not.
  virtual void finish_job(uint64_t job, const absl::Status& outcome) = 0;
  // True when nothing of the job moves any more (after finish_job): its blocks may be freed. The
  // job is forgotten then.
  virtual bool is_saved(uint64_t job) = 0;
};

}  // namespace baton::kvtransfer
