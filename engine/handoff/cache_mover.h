// This engine's blocks for a session: converted into the asking reader's layout at prefill, out of
// the other engine's layout at decode, through staging memory on this side. What is sent is what
// was converted, and its checksum is of that.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/handoff/foreign_layout.h"
#include "engine/handoff/staging.h"
#include "engine/kernels/kv_cache.h"
#include "kvtransfer/agent.h"
#include "kvtransfer/session/kv_mover.h"

namespace baton::engine::handoff {

class CacheMover : public kvtransfer::session::KvMover {
 public:
  using Json = nlohmann::json;
  struct Identity {
    std::string model;        // of the checkpoint: equal at both ends, or nothing is handed over
    std::string fingerprint;  // of the arithmetic too: equal KV is equal to the bit
  };
  // The staging memory is registered with the agent. Both outlive the session's close().
  CacheMover(const KvCache& cache, kvtransfer::Agent& agent, Staging& staging, Identity identity)
      : cache_(cache),
        own_(ForeignLayout::own(cache.geometry())),
        agent_(agent),
        staging_(staging),
        identity_(std::move(identity)) {}

  size_t layers() const override { return own_.layers.size(); }
  absl::StatusOr<std::shared_ptr<const Reader>> meet(const std::string& reader,
                                                     const Json& want) override;
  Json layout(const Json& want,
              const absl::StatusOr<std::shared_ptr<const Reader>>& reader) override;
  std::unique_ptr<Kept> keep(size_t tokens) override;
  Json about() const override;
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
  struct TheirCache;
  class Blocks;
  class Copies;
  class Into;

  // How a peer's cache lies. An error that names what does not fit: another model, or a cache that
  // blocks of ours cannot be made for.
  absl::StatusOr<ForeignLayout> layout_in(const Json& message) const;

  const KvCache cache_;
  const ForeignLayout own_;
  kvtransfer::Agent& agent_;
  Staging& staging_;
  const Identity identity_;
  std::map<size_t, kvtransfer::AgentListId> local_;  // pieces of the staging memory, by their bytes
};

}  // namespace baton::engine::handoff
