// Prefill's side of disaggregation: prompts computed for decode workers, and their KV under way.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "engine/serve/cache/block_manager.h"
#include "engine/serve/requests/sequence.h"
#include "kvtransfer/kv_connector.h"
#include "transport/clock.h"

namespace baton::engine::serve {

struct PrefillLimits {
  int vocab_size = 0;
  size_t max_tokens = 0;  // of one job: the model's context and the cache
  uint32_t layers = 0;
  Time loads_apart{};  // how long loads of a job may come after the first
};

// Blocks of a sequence that one step completes, in every layer.
struct BlockRange {
  size_t first = 0;
  size_t count = 0;

  // The part of it at or behind `block`.
  BlockRange from(size_t block) const {
    const size_t begin = std::min(std::max(first, block), first + count);
    return {begin, first + count - begin};
  }
};

// The blocks that computing [begin, end) of `total` tokens completes: the full ones, and with the
// last token also a partial one.
BlockRange completed_blocks(size_t begin, size_t end, size_t total);

// Not thread-safe.
class PrefillJobs {
 public:
  PrefillJobs(PrefillLimits limits, kvtransfer::KvConnector& connector, BlockManager& blocks)
      : limits_(limits), connector_(connector), blocks_(blocks) {}

  // The next job as a sequence; null if there is none. Jobs that cannot be computed are refused
  // here, with the reason sent back.
  std::unique_ptr<Sequence> accept();
  bool is_wanted(const Sequence& sequence) const { return connector_.is_wanted(sequence.job->job); }
  // Sends the blocks that the prefix cache gave, of all layers.
  absl::Status send_cached(const Sequence& sequence);
  // Nothing more will be sent. The blocks are freed when nothing of the job moves any more.
  void finish(Sequence* sequence, const absl::Status& outcome);

  // Frees what has been sent.
  void poll();
  bool quiet() const { return saving_.empty(); }
  // References that jobs under way hold.
  uint64_t references() const;

 private:
  struct Saving {
    uint64_t job = 0;
    std::vector<uint32_t> blocks;
  };
  absl::Status check(const kvtransfer::KvJob& job) const;

  const PrefillLimits limits_;
  kvtransfer::KvConnector& connector_;
  BlockManager& blocks_;
  std::vector<Saving> saving_;
};

}  // namespace baton::engine::serve
