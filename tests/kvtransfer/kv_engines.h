// Two engines without a model, for tests of KvConnectors: a prefill that "computes" KV whose every
// byte follows from (request, layer, block, head), and a decode that checks each byte of it. Both
// overwrite a block the moment they may, so that a byte read or written too late is seen.
#pragma once

#include "kvtransfer/kv_connector.h"
#include "kvtransfer/kv_plan.h"
#include "tests/std.h"

namespace baton::kvtransfer {

// The dense cache of a test: `heads` heads of 8 from `first_head`.
KvLayout test_layout(uint32_t blocks, uint32_t first_head = 0, uint32_t heads = 8);
inline constexpr uint32_t kTestBlockTokens = 4;
// K and V of 8 heads, 6 layers, in blocks of any size: layouts that can be cut.
KvShape test_shape(uint32_t blocks, uint32_t block_tokens, uint32_t first_head = 0,
                   uint32_t heads = 8);
// 6 layers in two groups with blocks of their own sizes; every other layer keeps `window` tokens.
KvLayout hybrid_layout(uint32_t blocks, uint32_t block_tokens, uint32_t window_block_tokens,
                       uint32_t window);

// A cache in a connector's memory, and which blocks of it are free.
class TestCache {
 public:
  // `memory`: where the buffers lie, as register_cache() takes it; empty: in the connector's
  // memory.
  TestCache(KvConnector& connector, const KvLayout& layout, std::vector<void*> memory = {});

  const KvLayout& layout() const { return layout_; }
  size_t free_blocks() const { return free_.size(); }
  // In random order; empty if there are not so many.
  std::vector<uint32_t> allocate(size_t count, std::mt19937& random);
  // Overwrites them with the canary.
  void free(const std::vector<uint32_t>& blocks);

  size_t groups() const { return layout_.groups.size(); }
  size_t group_of(uint32_t layer) const { return places_[layer].first; }
  uint32_t layers() const { return static_cast<uint32_t>(places_.size()); }

  // Computes the KV of all tokens of a sequence's block `index`.
  void fill(uint32_t block, uint32_t layer, KvRequestId request, uint64_t index);
  // Whether the block holds what fill() put into another cache, whatever its layout: all heads of
  // this one, those of the block's tokens that are among `tokens`.
  bool holds(uint32_t block, uint32_t layer, KvRequestId request, uint64_t index,
             KvTokens tokens) const;
  // How many bytes of free blocks have changed since free().
  size_t damaged() const;

 private:
  // Calls visit(address, bytes, what) for every row of elements of a block; `what` names it.
  template <typename Visit>
  void for_each_row(uint32_t block, uint32_t layer, uint64_t index, KvTokens tokens,
                    const Visit& visit) const;
  void paint(uint32_t block);
  KvLayout layout_;
  std::vector<std::pair<uint32_t, uint32_t>> places_;  // group and index in it, by layer
  std::vector<std::byte*> buffers_;
  std::vector<uint32_t> free_;  // of every group: a number is free in all or in none
};

class TestPrefill {
 public:
  TestPrefill(KvConnector& connector, const KvLayout& layout, uint32_t seed,
              std::vector<void*> memory = {})
      : connector_(connector), cache_(connector, layout, std::move(memory)), random_(seed) {}

  // Starts before decode has asked; `request` is what the loads with this key will be called.
  absl::Status bind(const KvBinding& binding, KvRequestId request);
  // Takes new jobs, computes one chunk of one layer, frees what is saved.
  void step();
  // Computes no job beyond this layer of its last chunk.
  void stop_before_layer(uint32_t layer) { stop_before_layer_ = layer; }
  // Finishes all jobs with this from now on, right away.
  void refuse(absl::Status why) { refusal_ = std::move(why); }
  // Finishes jobs that have blocks missing.
  void forget_a_block() { forget_a_block_ = true; }

  size_t open_jobs() const { return jobs_.size(); }
  size_t jobs_seen() const { return seen_; }
  size_t unwanted() const { return unwanted_; }
  const TestCache& cache() const { return cache_; }

 private:
  struct Job {
    KvJob job;
    std::vector<std::vector<uint32_t>> blocks;  // by group
    uint64_t chunk_begin = 0;                   // in tokens, of the chunk in work
    uint64_t chunk_end = 0;
    uint32_t layer = 0;
    bool finished = false;
  };
  bool start(KvJob job);
  void compute(Job& job);
  void finish(Job& job, const absl::Status& outcome);

  KvConnector& connector_;
  TestCache cache_;
  std::mt19937 random_;
  std::vector<Job> jobs_;
  std::vector<KvJob> queue_;
  uint32_t stop_before_layer_ = UINT32_MAX;
  absl::Status refusal_;
  bool forget_a_block_ = false;
  size_t seen_ = 0;
  size_t unwanted_ = 0;
};

struct TestLoad {
  enum class State { kOpen, kEnding, kEnded };
  State state = State::kOpen;
  std::vector<uint32_t> blocks;
  struct Group {
    KvTokens kept;
    uint64_t first_block = 0;
    std::vector<uint32_t> blocks;
  };
  std::vector<Group> groups;
  uint32_t verified = 0;  // layers
  bool wrong = false;     // a byte of a layer that was said to be here
  bool cancel = false;    // end it as soon as `cancel_at` layers are here
  uint32_t cancel_at = 0;
  absl::Status status;  // how it ended
  std::string payload;  // of a complete one
  // Of one that failed, when it ended: blocks that were not said to have failed, and do not hold
  // their KV in all layers.
  size_t wrongly_kept = 0;
  size_t kept = 0;  // that do
};

class TestDecode {
 public:
  TestDecode(KvConnector& connector, const KvLayout& layout, uint32_t seed,
             std::vector<void*> memory = {})
      : connector_(connector), cache_(connector, layout, std::move(memory)), random_(seed) {}

  absl::Status start(KvRequestId id, const std::string& prefill, uint32_t tokens,
                     uint32_t first_token = 0, Time timeout = patient(std::chrono::seconds(60)));
  // `load` without tokens and blocks.
  absl::Status start(KvLoad load, uint32_t tokens);
  // Checks new layers, ends what is complete, failed or to be cancelled.
  void step();
  void cancel(KvRequestId id, uint32_t when_layers = 0);

  const TestLoad& load(KvRequestId id) const { return loads_.at(id); }
  size_t open() const;
  const TestCache& cache() const { return cache_; }

 private:
  KvConnector& connector_;
  TestCache cache_;
  std::mt19937 random_;
  std::map<KvRequestId, TestLoad> loads_;
};

}  // namespace baton::kvtransfer
