// A prefill and a decode connector joined in memory: random delays, random order, injected faults.
#pragma once

#include "kvtransfer/kv_connector.h"
#include "tests/std.h"

namespace baton::engine::serve {

struct LoopbackFaults {
  double refuse_start = 0;  // start_load() itself fails
  double fail_load = 0;     // the load fails at a random moment
  double lose_load = 0;     // nothing ever arrives: time out after some polls
  double speed = 0.5;       // how likely each of five copies per load and poll is to move
  double repeat = 0.5;      // how likely one copy per load and poll is to move once more
};

// Checks the rules that a real connector relies on, as GoogleTest expectations: source blocks do
// not change between save_layer() and the moment they are sent; no block is handed over twice; jobs
// and loads are used as the header says. Target blocks are filled with NaN before a load, and
// ended loads go on writing NaN until end_load() has returned true: a block reused or read too
// early shows in the tokens. So does one that decode writes to before that: until then what has
// arrived may arrive once more.
class LoopbackLink {
 public:
  explicit LoopbackLink(uint64_t seed, LoopbackFaults faults = {});
  ~LoopbackLink();

  kvtransfer::KvConnector& decode() { return *decode_; }
  kvtransfer::KvConnector& prefill() { return *prefill_; }
  // Steps the prefill engine while decode waits for a layer in its own step.
  void set_pump(std::function<void()> pump) { pump_ = std::move(pump); }

  // Layers from this one on do not arrive, of any load that is open now or later; -1: all do.
  int hold_from_layer = -1;

  uint64_t loads_started = 0;
  uint64_t loads_failed = 0;
  uint64_t blocks_moved = 0;
  uint64_t late_writes = 0;
  uint64_t repeats = 0;
  uint64_t sleeps = 0;  // of decode

 private:
  friend class LoopbackDecode;
  friend class LoopbackPrefill;

  struct Copy {
    uint32_t layer;
    uint32_t source;
    uint32_t target;
    std::string content;  // of the source when it was handed over
  };
  struct Load {
    kvtransfer::KvLoad request;
    uint64_t job = 0;
    bool taken = false;     // by next_job()
    bool finished = false;  // finish_job() was called
    bool ended = false;     // end_load() was called
    bool gone = false;      // end_load() has returned true
    int quiet_after = 0;    // polls
    int fails_after = -1;   // copies; -1: never
    int polls_left = -1;    // until it times out; -1: never
    absl::Status status;
    std::vector<size_t> arrived;  // blocks per layer
    std::set<std::pair<uint32_t, uint32_t>> handed_over;
    std::vector<Copy> queue;
    std::vector<Copy> arrived_copies;
  };
  struct Side {
    kvtransfer::KvLayout layout;
    std::unique_ptr<std::byte, void (*)(void*)> memory{nullptr, nullptr};
    // All heads, K and V, of a block.
    std::byte* block(uint32_t layer, uint32_t index) const {
      const kvtransfer::KvField& keys = layout.groups[0].fields[0];
      return memory.get() + keys.places[layer].offset + index * keys.block_stride;
    }
    size_t block_bytes() const { return layout.groups[0].fields[0].block_stride; }
  };

  void* allocate(Side& side, const kvtransfer::KvLayout& layout);
  void move_some();
  void deliver(Load& load, size_t index);
  void repeat_one(const Load& load);
  Load* by_job(uint64_t job);
  bool chance(double probability) { return uniform_(random_) < probability; }

  std::mt19937_64 random_;
  std::uniform_real_distribution<double> uniform_{0, 1};
  const LoopbackFaults faults_;
  std::function<void()> pump_;
  Side source_, target_;
  std::map<kvtransfer::KvRequestId, Load> loads_;
  uint64_t next_job_ = 1000;
  std::unique_ptr<kvtransfer::KvConnector> decode_, prefill_;
};

}  // namespace baton::engine::serve
