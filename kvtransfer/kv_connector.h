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
// Prefill may be first: it bind()s the request's key, computes, and what it saves leaves when a
// load with that key comes. A load may gather heads from all workers of a tensor-parallel prefill
// group, and several decode workers may load what one prefill worker computes once.
//
// A load may instead *pull*: prefill offers its blocks, and decode reads them, layer by layer, as
// they are computed. The calls are the same on both sides; what differs is who holds what until
// when:
//
//   decode                                       prefill
//   start_load({.pull = true}) --- asks --->     next_job(job)
//                              <-- offers ---      save_layer(id, layer, blocks)
//   layers_loaded(id) grows    --- reads -->     finish_job(id)
//   the last read has ended    --- says so ->    is_saved(id): the blocks are free again
//
// Prefill's blocks are held under a *lease*: until decode has said that it reads no more, or the
// lease is over. Decode's connector renews it three times in its length, inside the calls that
// advance transfers. It takes what it read for KV only where the read ended before a renewal that
// prefill has confirmed ran out, so prefill may free its blocks when the lease is over, whatever
// has become of decode. That holds while the clocks of the two machines run at the same speed, to 1
// in 512, and neither stands still (a virtual machine that is stopped and goes on later). Decode's
// blocks are written by decode alone: when its reads have ended, nothing can arrive any more.
//
// Threads: one engine thread calls everything. A forked child makes a connector of its own: what
// its parent's is asked for there fails, and its destructor does nothing (kvtransfer/agent.h says
// what fork() waits for). Blocks named in a call stay pinned (neither freed
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

// KV that another engine hands over by name: the agent that has it, where that listens (host:port),
// and what it calls the transfer. `finished`: it has computed the prompt, so that it must know of
// the transfer. `ranks`: its tensor-parallel degree; worker k of it is agent/k, at the address'
// port plus k; or `address` names all of them, with commas in between. Each may also be what
// Agent::address() says.
struct KvTransfer {
  // Instead of `agent`, `address` and `ranks`: each worker of the prefill, in the order of ranks.
  struct At {
    std::string agent;
    std::string address;
  };
  std::string transfer;
  std::string agent;
  std::string address;
  bool finished = false;
  uint32_t ranks = 1;
  std::vector<At> workers{};
};

// Decode asks for the KV of tokens [first_token, tokens.size()).
struct KvLoad {
  KvRequestId id = 0;
  std::string prefill;  // address of the prefill worker, as its address() gave it
  // Instead: the addresses of a tensor-parallel group, in the order of ranks. Each sends its share
  // of the heads (KvShare in kv_plan.h); those that have none are not asked.
  std::vector<std::string> shards;
  // Instead: what is handed over, for sources that take part in that (KvSession); connectors do not
  // (InvalidArgument).
  std::optional<KvTransfer> transfer;
  bool ask = false;   // of a transfer: prefill is asked to compute `tokens` (KvOrder::tokens)
  bool push = false;  // of a transfer: prefill writes the blocks, instead of being read
  // The request's name at both ends, at most 256 bytes; "": none. Loads with the same key are one
  // job, and of the same tokens as far as both go (else InvalidArgument).
  std::string key;
  uint32_t loads_of_key = 1;    // how many come to one prefill worker: its decode workers
  std::vector<int32_t> tokens;  // from the start of the sequence
  uint32_t first_token = 0;     // KV before it is here already; a multiple of every block size
  // Where the KV of [first_token, ...) goes, in order; group after group where the layout has
  // several. A group with a window needs the blocks of its last tokens only.
  std::vector<uint32_t> blocks;
  Time timeout = patient(std::chrono::seconds(60));
  // How long prefill may say nothing, not even that it is alive, before the load fails
  // (Unavailable); zero: any time. It is asked several times meanwhile. Only time in which this
  // worker looked counts, so call progress() or wait() often. A prefill worker that is silent
  // refuses further loads at once, until it is heard of again. One of an older release does not
  // answer: it is waited for until `timeout`.
  Time silence{};
  // Read the blocks out of prefill's memory instead of having them written here. Prefill has to
  // allow it (BatonConnectorOptions::allow_pull); one that does not, or that is older than pulling,
  // refuses the load and says so.
  bool pull = false;
  // With `pull`: for how long prefill holds the blocks when it hears nothing from here, at most a
  // day. It may grant less (BatonConnectorOptions::max_lease). Nothing is lost by a long one but
  // prefill's memory, should this worker die: call progress(), wait() or another call that advances
  // transfers at least three times in it. Who is too late loses the load (DeadlineExceeded), but
  // not the blocks that were read by then (failed_blocks()).
  Time lease = patient(std::chrono::seconds(10));
};

// The same request, as the prefill worker sees it.
struct KvJob {
  uint64_t job = 0;         // this worker's number for it
  KvRequestId request = 0;  // decode's number for it, for timelines
  std::string decode;       // the asking worker's name, for messages
  std::vector<int32_t> tokens;
  uint32_t first_token = 0;   // send from here on
  std::string key;            // the load's
  uint32_t loads_of_key = 1;  // likewise
};

// Prefill starts before decode has asked.
struct KvBinding {
  std::string key;      // that loads will name
  uint32_t tokens = 0;  // of the sequence: loads ask for these or fewer
  uint32_t loads = 1;   // that will come: the decode workers that share it
  Time lease = patient(std::chrono::seconds(60));  // for the last of them to come
};

struct KvConnectorStats {
  uint64_t bytes_sent = 0;  // by this worker's writes; what is pulled, decode counts
  uint64_t bytes_loaded = 0;
  uint64_t loads_failed = 0;
  uint64_t jobs_failed = 0;
  std::string route;  // of the last peer, for people
};

// Where the KV of a request may come from: a prefill worker, or another place that has kept it.
class KvSource {
 public:
  virtual ~KvSource() = default;

  // Advances transfers; never blocks. Call it between steps and between layers.
  virtual void progress() = 0;
  // Sleeps until something may have changed, at most `timeout`. `fd` (or -1) also ends the sleep
  // when readable, so that an engine can wait for requests and pages at once.
  virtual void wait(Time timeout, int fd) = 0;
  // Asks for a request's KV. Returns at once, and waits for no DNS; what goes wrong later shows in
  // load_status(). The blocks are pinned until end_load() has returned true, and no other load may
  // name them: a layer that is here may be read, but what arrived may come again (pulled: not).
  virtual absl::Status start_load(KvLoad load) = 0;
  // How many layers, counted from layer 0, are here completely.
  virtual uint32_t layers_loaded(KvRequestId id) = 0;
  // OK while under way and when complete; otherwise why the KV will never come (prefill died, timed
  // out, refused). The engine then prefills itself or gives up.
  virtual absl::Status load_status(KvRequestId id) = 0;
  // What is here is, to the bit, what this engine would have computed. Of a complete load.
  virtual bool is_exact(KvRequestId /*id*/) { return true; }
  // Ends a load, complete or not: tells prefill to stop. True when no byte can arrive any more: the
  // blocks may be reused. False: not yet, call again later (they stay in quarantine). A load that
  // pulls ends its own reads, then tells prefill: that takes no answer.
  virtual bool end_load(KvRequestId id) = 0;
};

class KvConnector : public KvSource {
 public:
  // --- both sides ------------------------------------------------------------------------------
  // Memory for the KV cache: registered, shared with peers, faulted in. Called once, before all
  // else. The layout's buffers one after the other, each aligned to 4096; owned by the connector.
  virtual absl::StatusOr<void*> allocate_cache(const KvLayout& layout) = 0;
  // The same with memory of the engine's own: buffers[i] is where the layout's buffer i begins. It
  // is registered, and has to outlive the connector. It may be a CUDA device's, where the layout
  // says so (KvBuffer::device); InvalidArgument where it lies elsewhere than that.
  virtual absl::Status register_cache(const KvLayout& /*layout*/,
                                      absl::Span<void* const> /*buffers*/) {
    return not_offered();
  }
  // How a peer reaches this worker: goes into KvLoad::prefill.
  virtual std::string address() const = 0;
  virtual KvConnectorStats stats() const = 0;
  // For callers that sleep elsewhere than in wait(), where a thread of the connector's moves the
  // bytes: a descriptor that becomes readable when progress() may find something (read 8 bytes to
  // clear it), and how long it may go without being called. -1: no such thread, use wait().
  virtual int event_fd() const { return -1; }
  virtual Time until_deadline() const { return kNever; }

  // --- decode: the calls of KvSource, and ------------------------------------------------------
  // Returns when layer `layer` is here; drives progress meanwhile. load_status() where it fails.
  virtual absl::Status wait_for_layer(KvRequestId id, uint32_t layer) = 0;

  // Moves the load's deadline, here and at prefill, to `timeout` from now. (Not the lease of one
  // that pulls: that renews itself, until the deadline.)
  virtual absl::Status renew_load(KvRequestId /*id*/, Time /*timeout*/) { return not_offered(); }
  // What prefill gave with the KV: the first token, sampling state. Unavailable until prefill has
  // finished: wait for it before end_load(), which forgets the load.
  virtual absl::StatusOr<std::string> load_payload(KvRequestId /*id*/) { return not_offered(); }
  // Which of the load's blocks do not hold all of their KV, as far as is known: all that prefill
  // has not confirmed (of a load that pulls: all that were not read in time), none where every
  // layer is here. Of a load that failed, the others may be kept.
  virtual std::vector<uint32_t> failed_blocks(KvRequestId /*id*/) { return {}; }

  // --- prefill ---------------------------------------------------------------------------------
  // The next request of a decode worker, if any.
  virtual std::optional<KvJob> next_job() = 0;
  // Opens a job for a key that no load has named yet; returns its number. next_job() does not give
  // it. From then on it is a job like others: what is saved is sent to each load with its key, at
  // once or when that comes. AlreadyExists: a job with this key is open.
  virtual absl::StatusOr<uint64_t> bind(const KvBinding& /*binding*/) { return not_offered(); }
  // Its loads may come until `lease` from now.
  virtual absl::Status renew_job(uint64_t /*job*/, Time /*lease*/) { return not_offered(); }
  // Goes to decode when the job is finished; at most kMaxPayload bytes. Before finish_job().
  virtual absl::Status give_payload(uint64_t /*job*/, const std::string& /*payload*/) {
    return not_offered();
  }
  static constexpr size_t kMaxPayload = 4096;
  // False once decode gave the job up or died, or let its lease run out, or no load came during the
  // job's: stop computing it.
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
  // True when nothing of the job moves any more (after finish_job) and no load of it is still to
  // come: its blocks may be freed. The job is forgotten then. For a load that pulls: when decode
  // has said that it reads no more, or its lease is over; also where the job failed, and where
  // decode died, who may be reading until then.
  virtual bool is_saved(uint64_t job) = 0;

 protected:
  // What a connector says that has no such call.
  static absl::Status not_offered() {
    return absl::UnimplementedError("this connector does not offer the call");
  }
};

}  // namespace baton::kvtransfer
