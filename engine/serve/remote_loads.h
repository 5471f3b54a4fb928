// Prompts whose KV is being fetched: from a prefill worker, another engine, or the KV tiers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/serve/cache/block_manager.h"
#include "engine/serve/requests/sequence.h"
#include "kvtransfer/kv_connector.h"
#include "transport/clock.h"

namespace baton::engine::serve {

enum class LoadFailurePolicy : uint8_t { kRecompute, kFail };

struct RemoteLoadOptions {
  uint32_t layers = 0;
  size_t min_tokens = 32;  // with fewer missing tokens than this, computing them here is quicker
  LoadFailurePolicy on_failure = LoadFailurePolicy::kRecompute;
  Time timeout = patient(std::chrono::seconds(60));
  Time silence{};        // of a prefill worker, after which its loads fail; 0: any
  uint32_t ranks = 1;    // that load, each its own heads: of this server's model
  bool by_name = false;  // from Request::remote_prefill or prefill_address, by a transfer's name
  std::optional<bool> push;  // ... which prefill writes: EngineOptions::push
};

// Not thread-safe. Owns, through quarantine, the blocks of loads that were given up until no byte
// can arrive in them any more.
class RemoteLoads {
 public:
  RemoteLoads(RemoteLoadOptions options, kvtransfer::KvSource& connector, BlockManager& blocks);

  kvtransfer::KvSource& source() const { return connector_; }

  bool may_recompute() const { return options_.on_failure == LoadFailurePolicy::kRecompute; }
  // Whether the KV of a sequence with `cached` tokens in the prefix cache should be fetched.
  bool wants(const Sequence& sequence, size_t cached) const;
  // How many tokens of a sequence are loaded: all that fill a block, without the last one, whose
  // logits are wanted. A block is not written to before its load has ended, for what arrived may
  // arrive once more; so the one in which the sequence goes on is computed here from its start.
  static size_t loadable(const Sequence& sequence);
  // Asks for the KV of [computed, tokens), which fill blocks and are not beyond loadable(); the
  // sequence has blocks for all its tokens.
  absl::Status start(Sequence* sequence, size_t tokens);

  // How many layers are here: with one, the sequence can be computed while the rest arrives.
  uint32_t layers(const Sequence& sequence) const;
  // OK and true: everything is here. OK and false: under way. Else why it will not come.
  absl::StatusOr<bool> is_complete(const Sequence& sequence) const;

  // Everything arrived: the sequence keeps its blocks.
  void finish(Sequence* sequence);
  // The sequence loses its blocks, which are freed when nothing can arrive in them any more.
  void give_up(Sequence* sequence);

  // Frees the blocks of ended loads that have become quiet.
  void poll();
  bool quiet() const { return closing_.empty(); }

 private:
  struct Closing {
    kvtransfer::KvRequestId id = 0;
    uint64_t quarantine = 0;
  };

  absl::StatusOr<kvtransfer::KvTransfer> ask_at(const std::string& address) const;

  const RemoteLoadOptions options_;
  const std::string nonce_;  // no other server's transfers have such names
  kvtransfer::KvSource& connector_;
  BlockManager& blocks_;
  kvtransfer::KvRequestId next_id_ = 1;
  std::vector<Closing> closing_;
};

}  // namespace baton::engine::serve
