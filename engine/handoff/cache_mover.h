// This engine's blocks for a session. Between two caches of this make they are read where they lie,
// into where they belong. Others are converted: into the asking reader's layout at prefill, out of
// the other engine's layout at decode, through staging memory on this side; what is sent is what
// was converted, and its checksum is of that. A reader that wants to be written to is, by a plan
// between the two caches, whatever they look like. Of several ranks each moves its own heads.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/handoff/foreign_layout.h"
#include "engine/handoff/staging.h"
#include "engine/kernels/kv_cache.h"
#include "kvtransfer/agent.h"
#include "kvtransfer/kv_plan.h"
#include "kvtransfer/session/direct_mover.h"
#include "kvtransfer/session/kv_mover.h"
#include "transport/timeline.h"

namespace baton::engine::handoff {

class CacheMover : public kvtransfer::session::KvMover {
 public:
  using Json = nlohmann::json;
  struct Identity {
    std::string model;        // of the checkpoint: equal at both ends, or nothing is handed over
    std::string fingerprint;  // of the arithmetic too: equal KV is equal to the bit
  };
  // The cache, of rank `me`, and the staging memory are registered with the agent. All outlive the
  // session's close(). `device`: the one whose memory the cache is; none: the host.
  CacheMover(const KvCache& cache, std::optional<int> device, kvtransfer::KvWorker me,
             kvtransfer::Agent& agent, Staging& staging, Identity identity,
             Timeline* timeline = nullptr);

  size_t layers() const override { return own_.layers.size(); }
  absl::StatusOr<std::shared_ptr<const Reader>> meet(const std::string& reader,
                                                     const Json& want) override;
  Json layout(const Json& want,
              const absl::StatusOr<std::shared_ptr<const Reader>>& reader) override;
  std::unique_ptr<Kept> keep(size_t tokens) override;
  Json about() const override;
  Json about_blocks() const override;
  absl::StatusOr<std::vector<kvtransfer::KvRun>> runs_of(
      const kvtransfer::KvLoad& load) const override;
  absl::StatusOr<std::shared_ptr<Source>> understand(const Json& layout) override;
  absl::StatusOr<std::shared_ptr<Source>> reach(const std::string& prefill,
                                                std::shared_ptr<Source> source,
                                                const std::shared_ptr<Source>& before) override;
  absl::StatusOr<std::unique_ptr<Incoming>> begin(std::vector<kvtransfer::KvRun> runs,
                                                  size_t sources,
                                                  kvtransfer::KvRequestId id) override;

 private:
  using KvHeads = kvtransfer::KvHeads;
  struct ReadersCache;
  struct TheirCache;
  class Blocks;
  class Shown;
  class Copies;
  class Written;
  class Into;

  // The weights' name in plans, for all caches of this engine: layout_in() has compared the models.
  static constexpr const char* kOwnWeights = "baton";
  static size_t blocks_of(size_t tokens, const ForeignLayout& layout) {
    return (tokens + layout.block_tokens - 1) / layout.block_tokens;
  }
  // CRC-32, as zlib's.
  static uint32_t block_checksum(const std::byte* block, size_t bytes);
  // The rank of worker agent/k in an engine of `ranks`.
  static uint32_t rank_of(const std::string& agent, uint32_t ranks);
  static uint32_t ranks_in(const Json& message) {
    return message.value("ranks", Json(1)).get<uint32_t>();
  }

  // How the cache of a peer lies, as it says. An error that names what does not fit: another model,
  // or a cache that blocks of ours cannot be made for.
  absl::StatusOr<ForeignLayout> layout_in(const Json& message) const;
  // ... and `peer`, the agent of one of its `ranks`.
  absl::Status place(ForeignLayout& layout, const std::string& peer, uint32_t ranks) const;
  // A cache of this make with these heads.
  ForeignLayout ours(KvHeads heads) const;
  size_t head_bytes() const { return cache_.geometry().block_bytes() / own_.heads; }
  // Some heads of all blocks of a layer of this cache.
  kvtransfer::StridedDescriptor row(size_t layer, KvHeads heads) const;
  kvtransfer::MemoryKind kind() const {
    return device_.has_value() ? kvtransfer::MemoryKind::kVram : kvtransfer::MemoryKind::kDram;
  }
  // The CRC-32 of what lies there; none of a device's memory, which the CPU must not touch.
  std::optional<uint32_t> checksum(uint64_t address, size_t bytes) const;
  // Calls `use` with a view of some blocks of a layer, numbered from 0, that the CPU may touch: of
  // a device's cache a copy, which is written back if it is `changed`.
  absl::Status with_blocks(
      uint32_t layer, absl::Span<const uint32_t> blocks, bool changed,
      absl::FunctionRef<void(const KvCache&, int layer, absl::Span<const uint32_t>)> use);

  const KvCache cache_;
  const std::optional<int> device_;
  const kvtransfer::KvWorker me_;
  const ForeignLayout own_;
  kvtransfer::Agent& agent_;
  Staging& staging_;
  const Identity identity_;
  Timeline* const timeline_;         // gets a span "transfer" for each read; may be null
  std::unique_ptr<KvMover> direct_;  // writes into others' caches
  std::map<size_t, kvtransfer::AgentListId> pieces_;  // of the staging memory, by their bytes
  std::map<uint32_t, kvtransfer::AgentListId> rows_;  // of the cache, by the first of their heads
  std::vector<uint32_t> numbers_;                     // from 0, for with_blocks()
};

}  // namespace baton::engine::handoff
