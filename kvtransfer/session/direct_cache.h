// What the two halves of a direct session share (direct_sends.cc, direct_loads.cc): a cache as
// layers that are planned each alone, and the routes from one cache to another.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kvtransfer/agent_kv.h"
#include "kvtransfer/kv_checksums.h"
#include "kvtransfer/kv_session.h"
#include "kvtransfer/session/kv_mover.h"

namespace baton::kvtransfer::session::direct {

using nlohmann::json;

// A layer of a cache, as it lies in memory.
struct Layer {
  KvPlacement placement;  // of this layer alone, number 0 of its layout
  uint32_t number = 0;    // the model's
  size_t group = 0;
  StridedDescriptor row;  // where it is said as one
  uint32_t tokens() const { return placement.layout.groups[0].block_tokens; }  // of a block
  uint32_t blocks() const { return placement.layout.groups[0].blocks; }
  MemoryKind kind() const {
    const bool device = placement.layout.buffers[0].device == KvDevice::kCuda;
    return device ? MemoryKind::kVram : MemoryKind::kDram;
  }
  uint32_t crc(uint32_t block) const;
};

// This worker's cache.
struct Cache {
  Agent& agent;
  KvWorker worker;
  json said, want;  // without rows
  std::vector<Layer> layers{};
  size_t groups = 0;
  bool checks = true;
};

// A fraction or a negative number throws: json would round it.
uint64_t number_in(const json& value);
const json& packing_in(const json& message, size_t layer);
// Checksums are taken by this process of its own memory: not of a device's.
bool checks_in(const json& message);
uint32_t ranks_in(const json& message);
// The tensor-parallel rank of worker agent/k in an engine with `ranks` of them.
uint32_t rank_of(absl::string_view agent, uint32_t ranks);
absl::StatusOr<Layer> layer_of(const json& row, const json& packing, const json& identity,
                               MemoryKind kind);
// The layers of a placement, each alone, in the order of their numbers.
std::vector<Layer> layers_of(const KvPlacement& whole);
// What a message says of a cache: rows of blocks, a packing for each; or a placement.
absl::StatusOr<std::vector<Layer>> layers_in(const json& message, const json& packings);
// That the source has all that it owes.
absl::Status check_complete(const KvPlan& plan, const KvShare& share);

// From a layer of prefill's to the same one of decode's.
struct Passage {
  std::optional<AgentKvPlan> plan;
  std::optional<KvChecksums> sums;
};

bool moves(const Passage& one);

// All passages between two caches, for one share of the heads.
struct Routes {
  std::vector<Passage> passages;   // of each layer of `from`, or `into`: that of this process
  std::vector<uint32_t> layer_of;  // of each layer there: which it is here; UINT32_MAX: none
  absl::Status why;                // there can be none
};

// The routes to one peer that were made already.
class KnownRoutes {
 public:
  std::shared_ptr<const Routes> get(const KvShare& share, absl::FunctionRef<Routes()> make) {
    for (const auto& [known, routes] : known_) {
      if (known == share) return routes;
    }
    auto made = std::make_shared<const Routes>(make());
    if (!made->why.ok()) return made;  // the other's memory may not be known yet
    if (known_.size() == kMost) known_.clear();
    return known_.emplace_back(share, std::move(made)).second;
  }

 private:
  static constexpr size_t kMost = 16;
  std::vector<std::pair<KvShare, std::shared_ptr<const Routes>>> known_;
};

// Between the layers of `ours` and those of `theirs` that have the same number. Decode needs all of
// its layers.
Routes routes_of(Cache& ours, Op op, const std::string& agent, const std::vector<Layer>& theirs,
                 const KvShare& share, bool checks);

// --- prefill: direct_sends.cc

// A decode engine that reads, or is written to.
struct Readers : KvMover::Reader {
  std::string agent;
  std::vector<Layer> layers;  // of its cache, where it says where that lies
  bool checks = true;
  // For each layer, how to take the checksums of what it reads; none: those of whole blocks.
  std::vector<std::optional<KvChecksums>> sums;
  mutable KnownRoutes routes, fits;  // fits: only whether there could be any
};

absl::StatusOr<std::shared_ptr<const KvMover::Reader>> meet_reader(const Cache& cache,
                                                                   const std::string& reader,
                                                                   const json& want);
absl::Status serves_reader(Cache& cache, std::shared_ptr<const Readers> reader, const json& want);
std::unique_ptr<KvMover::Kept> keep_blocks(Cache& cache);

// --- decode: direct_loads.cc

// A prefill's cache.
struct Theirs : KvMover::Source {
  json said;
  std::string agent;
  std::vector<Layer> layers;
  bool checks = true;
  mutable KnownRoutes routes;
};

std::unique_ptr<KvMover::Incoming> load_into(Cache& cache, std::vector<KvRun> runs, size_t sources);

}  // namespace baton::kvtransfer::session::direct
