// Which sequences compute how many tokens in the next step.
//
// As in vLLM's v1 scheduler there is no prefill phase and no decode phase: every sequence has
// computed some of its tokens and catches up with the rest under one token budget per step. Those
// running go first, in order, then those waiting. When blocks run out the sequence that was
// admitted last gives its blocks up and will be recomputed.
#pragma once

#include <cstddef>
#include <deque>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "engine/serve/cache/block_manager.h"
#include "engine/serve/cache/kv_tiers.h"
#include "engine/serve/remote_loads.h"
#include "engine/serve/requests/sequence.h"
#include "engine/shard/kv_ranks.h"

namespace baton::engine::serve {

struct ScheduledChunk {
  Sequence* sequence = nullptr;
  size_t tokens = 0;  // [computed, computed + tokens)
};

struct StepPlan {
  std::vector<ScheduledChunk> chunks;
  // Sequences that cannot go on, already removed: their loads could not even be started.
  std::vector<std::pair<Sequence*, absl::Status>> failed;
  // The same, but they are computed here.
  std::vector<std::pair<Sequence*, absl::Status>> not_loaded;
  // The only chunk's sequence, if its KV is still arriving: each layer has to be waited for.
  Sequence* streaming = nullptr;
  bool preempted = false;  // some sequence gave its blocks up
};

struct SchedulerOptions {
  size_t token_budget = 512;  // per step
  size_t max_sequences = 16;  // in the batch
  bool prefix_cache = true;
  BlockHash root;  // of the model
};

// Not thread-safe. Sequences belong to the engine; the scheduler keeps pointers.
class Scheduler {
 public:
  Scheduler(SchedulerOptions options, BlockManager& blocks) : options_(options), blocks_(blocks) {}

  // From now on prompts are looked up in `tiers` too, and loaded from there through `loads`.
  void use_tiers(KvTiers& tiers, RemoteLoads& loads) {
    tiers_ = &tiers;
    tier_loads_ = &loads;
  }

  // ... and prompts that requests say are elsewhere come from there.
  void use_sessions(shard::KvRanks& sessions, RemoteLoads& loads) {
    sessions_ = &sessions;
    loads_ = &loads;
  }

  void add(Sequence* sequence);
  // Takes a sequence out, whatever its state, and frees its blocks (an open load's go to
  // quarantine).
  void remove(Sequence* sequence);
  // The load of `sequence` has ended: it goes on behind the tokens that were loaded...
  void loaded(Sequence* sequence);
  // ... or gets in line again, first, to be computed here. Its blocks are gone.
  void load_failed(Sequence* sequence);

  // It was computed while its load arrived, and `layer` did not: it waits for that as before.
  void stalled(Sequence* sequence, uint32_t layer);

  // Takes the blocks that the planned chunks need. The reference is valid until the next call.
  const StepPlan& schedule();
  // After a chunk was computed: publishes its full blocks.
  void computed(const ScheduledChunk& chunk);

  bool empty() const {
    return waiting_.empty() && ready_.empty() && running_.empty() && loading_.empty();
  }
  size_t waiting() const { return waiting_.size(); }
  size_t running() const { return running_.size(); }
  const std::vector<Sequence*>& loading() const { return loading_; }

 private:
  void schedule_running();
  void schedule_ready();
  void schedule_waiting();
  void schedule_streaming();
  bool admit(Sequence* sequence);
  void load_from(RemoteLoads& source, Sequence* sequence, size_t tokens);
  void start(Sequence* sequence, size_t tokens);
  bool reserve(Sequence* sequence, size_t tokens);
  bool preempt_for(size_t index);
  void publish(Sequence* sequence);

  const SchedulerOptions options_;
  BlockManager& blocks_;
  KvTiers* tiers_ = nullptr;
  RemoteLoads* tier_loads_ = nullptr;
  shard::KvRanks* sessions_ = nullptr;
  RemoteLoads* loads_ = nullptr;
  std::deque<Sequence*> waiting_;
  std::deque<Sequence*> ready_;
  std::vector<Sequence*> running_;
  std::vector<Sequence*> loading_;
  StepPlan plan_;
  size_t budget_ = 0;
};

}  // namespace baton::engine::serve
