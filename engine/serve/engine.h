// The serving engine: continuous batching over a paged KV cache, alone or as half of a pair.
//
//   auto engine = Engine::create(model, tokenizer, {.blocks = 4096});
//   (*engine)->add_request({.id = 1, .tokens = prompt, .on_event = ...});
//   while ((*engine)->has_work()) {
//     if (!(*engine)->step()) (*engine)->wait(std::chrono::milliseconds(100), -1);
//   }
//
// The output of a request depends on its tokens and sampling parameters alone, to the bit: not on
// what else is in the batch, how its prompt is cut into chunks, preemption, prefix hits, or which
// worker computed its KV.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/handoff/hand_off.h"
#include "engine/kernels/compute_pool.h"
#include "engine/model/model.h"
#include "engine/model/model_runner.h"
#include "engine/serve/admission.h"
#include "engine/serve/cache/block_manager.h"
#include "engine/serve/cache/kv_tiers.h"
#include "engine/serve/liveness.h"
#include "engine/serve/remote_loads.h"
#include "engine/serve/requests/request.h"
#include "engine/serve/scheduler.h"
#include "engine/serve/step_hook.h"
#include "engine/shard/kv_ranks.h"
#include "engine/shard/leader.h"
#include "engine/shard/limits.h"
#include "engine/tokenizer/tokenizer.h"
#include "transport/clock.h"
#include "transport/timeline.h"

namespace baton::engine::serve {

struct EngineOptions {
  uint32_t blocks = 2048;         // of 16 tokens
  size_t token_budget = 512;      // most tokens computed per step
  size_t max_sequences = 16;      // in one step; at most token_budget
  bool prefix_cache = true;       // reuse the KV of prompts that begin alike
  int threads = 1;                // that compute; 0: one per CPU
  size_t min_remote_tokens = 32;  // fewer missing prompt tokens are computed here
  LoadFailurePolicy on_load_failure = LoadFailurePolicy::kRecompute;
  Time load_timeout = patient(std::chrono::seconds(60));
  // ... and for how long a prefill worker may say nothing, which one that only computes does not;
  // 0: until load_timeout.
  Time load_silence = patient(std::chrono::seconds(1));
  // Moves KV to and from other engines: computes prompts that these ask for, and serves requests
  // with hand_over, remote_prefill or prefill_address; null: these are refused, or computed here.
  // Rank 0's session; with several ranks each has its own. It must outlive the engine.
  handoff::HandOff* hand_off = nullptr;
  // Prefill writes KV into our blocks, or we read it out of prefill's. None: it writes what we have
  // asked it to compute, and what it hands over by name is read.
  std::optional<bool> push;
  bool serialize_sends = false;  // nothing is sent before all is computed: for comparison
  KvTierOptions tiers;           // below the prefix cache; needs prefix_cache
  // The model is one of several parts, and this is their rank 0. It must outlive the engine, and
  // knows of `tiers` if there are some.
  shard::Leader* leader = nullptr;
  // Computes in place of the CPU, and has the KV cache in its memory; it must outlive the engine.
  // Not yet with `leader`.
  ModelRunner* runner = nullptr;
  Timeline* timeline = nullptr;  // spans per layer ("compute", "wait") and per step ("step")
  const Clock* clock = nullptr;  // default: Clock::steady()

  shard::StepLimits limits() const { return {blocks, token_budget, max_sequences}; }
};

struct EngineStats {
  uint64_t steps = 0;
  uint64_t tokens_computed = 0;
  uint64_t requests_begun = 0;  // that have a token
  uint64_t requests_finished = 0;
  uint64_t jobs_finished = 0;  // prompts that other engines have asked for
  uint64_t preemptions = 0;
  uint64_t cached_tokens = 0;    // prompt tokens found in the prefix cache
  uint64_t loaded_tokens = 0;    // prompt tokens whose KV came from a prefill worker
  uint64_t tier_tokens = 0;      // prompt tokens whose KV came from the KV tiers
  uint64_t kv_bytes_sent = 0;    // of prompts that were computed for other engines, at all ranks
  uint64_t kv_bytes_loaded = 0;  // of loads that were complete
  uint64_t loads_failed = 0;
  uint64_t loads_stalled = 0;  // whose prompt was computed as layers came, and one did not
  size_t waiting = 0;
  size_t running = 0;
  size_t loading = 0;
  uint32_t blocks = 0;
  uint32_t free_blocks = 0;
  uint32_t quarantined_blocks = 0;
  uint32_t cached_blocks = 0;          // that can be found by their prefix
  kvtransfer::tiers::TierStats tiers;  // zeros without any
};

// Not thread-safe: one thread calls everything (engine/serve/engine_thread.h has one of its own).
class Engine {
 public:
  // `model`, `tokenizer` and the timeline must outlive the engine.
  static absl::StatusOr<std::unique_ptr<Engine>> create(const Model& model,
                                                        const Tokenizer& tokenizer,
                                                        EngineOptions options);
  ~Engine();

  // InvalidArgument if a token or parameter is out of range, OutOfRange if the prompt is longer
  // than the context or the cache, AlreadyExists for an id in use.
  absl::Status add_request(Request request);
  // Ends a request with FinishReason::kAbort; false if there is none with this id.
  bool abort(uint64_t id);
  void abort_all(const absl::Status& why);

  // Computes the next batch. False if there was nothing to compute and nothing has changed: then
  // wait() before calling it again. Where the step waits for KV to arrive, a readable `wake_fd`
  // (-1: none) ends it early.
  bool step(int wake_fd = -1);
  // OK as long as it can compute. Otherwise it never will again (a device is lost): every request,
  // old or new, ends with this.
  const absl::Status& alive() const { return stopped_; }
  // Requests or blocks under way.
  bool has_work() const;
  // ... or blocks that another engine may still fetch.
  bool owes_others() const { return has_work() || !held_.empty(); }
  // Some of that work can be computed now, without waiting for others.
  bool owes_step() const { return !scheduler_.empty() && scheduler_.loading().empty(); }
  // Layers count; whoever calls step() tells the rest.
  Liveness& liveness() { return liveness_; }
  // Sleeps until a peer or `fd` (-1: none) has something, at most `timeout`.
  void wait(Time timeout, int fd);

  // Prompt and output together.
  size_t max_context() const { return max_context_; }
  EngineStats stats() const;
  Backlog backlog() const;
  // Where other engines ask for KV (engine/shard/kv_address.h); "" without a session.
  const std::string& kv_address() const { return kv_address_; }
  // The weights' (Model::fingerprint()).
  const std::string& fingerprint() const { return model_.fingerprint(); }
  // Counts all blocks again; for tests.
  absl::Status check_integrity() const;
  // Null where none was asked for.
  KvTiers* tiers() const { return tiers_.get(); }

 private:
  Engine(const Model& model, const Tokenizer& tokenizer, EngineOptions options);
  absl::Status start();
  absl::Status start_sessions();
  absl::Status start_tiers();

  // KV for other engines: engine_hand_off.cc.
  absl::Status check_hand_off(const Request& request) const;
  bool follow_sends();
  uint64_t kv_bytes(size_t tokens) const;
  std::optional<kvtransfer::KvTransfer> end_hand_off(Sequence& sequence, FinishReason reason,
                                                     const absl::Status& why);

  bool follow_loads();
  void run(const StepPlan& plan);
  absl::Status look_at_runner(absl::Status status);
  bool end_all();
  absl::Status compute(const StepPlan& plan);
  void let_runner_draw(const StepPlan& plan);
  void note_failed_load(Sequence* sequence, const absl::Status& why);
  void load_failed(Sequence* sequence, const absl::Status& why);
  void note_admitted(const StepPlan& plan);
  void load_ended(Sequence* sequence);
  void load_finished(Sequence* sequence);
  void advance(const ScheduledChunk& chunk, size_t row);
  void take_logits(Sequence* sequence, size_t token, std::span<const float> logits);
  std::optional<FinishReason> accept_token(Sequence& sequence, int32_t token, std::string* text);
  void finish(Sequence* sequence, FinishReason reason, const absl::Status& status,
              OutputEvent event = {});

  const Model& model_;
  const Tokenizer& tokenizer_;
  const EngineOptions options_;
  const Clock& clock_;
  Liveness liveness_;
  ComputePool pool_;
  size_t max_context_ = 0;
  BlockManager blocks_;
  Scheduler scheduler_;
  StepHook hook_;
  Sampler sampler_;
  std::optional<shard::KvMemory> memory_;
  std::unique_ptr<KvTiers> tiers_;  // reads and writes the memory: gone before it
  std::optional<RemoteLoads> tier_loads_;
  std::optional<shard::KvRanks> sessions_;
  std::string kv_address_;
  std::optional<RemoteLoads> loads_;
  std::vector<uint64_t> asked_;  // requests that other engines have asked for
  size_t asks_ = 0;              // of these, live ones
  size_t unbegun_ = 0;           // live requests of clients, without a token yet
  uint64_t next_asked_ = uint64_t{1} << 63;
  absl::flat_hash_map<uint64_t, std::vector<uint32_t>> held_;  // by send: blocks for other engines
  std::optional<CpuRunner> cpu_;
  ModelRunner* runner_ = nullptr;  // the options', or cpu_
  std::vector<float> logits_;      // [max_sequences][vocab_size]
  std::vector<SequenceChunk> chunks_;
  std::vector<DrawRule> draws_;  // of a runner that draws, by chunk
  absl::flat_hash_map<uint64_t, std::unique_ptr<Sequence>> requests_;
  EngineStats stats_;
  absl::Status stopped_;  // OK: it has not
  int wake_fd_ = -1;      // of this step
  uint64_t logged_failed_loads_ = 0;
  Time log_failed_loads_at_{};
};

}  // namespace baton::engine::serve
