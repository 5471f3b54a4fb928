// The memory of a communicator: pool blocks for callers and for staging, and whether a pointer of a
// caller lies in it.
//
// Peers know the first kMaxRegions regions only. Callers cannot use up all of them: some are kept
// for what links stage. Memory of a caller in any further region works as memory from elsewhere
// does, with a copy on its way.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "collectives/executor/geometry.h"
#include "transport/pool.h"
#include "transport/worker.h"

namespace baton::collectives::executor {

class Memory {
 public:
  static constexpr size_t kMaxRegions = 512;
  struct Limits {
    size_t slab_bytes = 16 << 20;
    size_t regions = kMaxRegions;  // that peers may know; no more than that
    size_t regions_of_callers = kMaxRegions - 112;
  };

  static absl::StatusOr<std::unique_ptr<Memory>> create(Worker& worker, const Limits& limits);
  ~Memory();

  // Zeroed. ResourceExhausted: no memory, or, where peers must know the block, too many regions.
  absl::StatusOr<Block> allocate(size_t bytes);
  absl::StatusOr<Block> allocate_for_caller(size_t bytes);
  // As allocate(), for bytes on their way: with whatever lay there before.
  absl::StatusOr<Block> stage(size_t bytes);
  void free(const Block& block) { pool_->free(block); }

  // A registered region of ours.
  struct Region {
    MemoryRegion local;
    uint32_t number = 0;  // of regions(), from 0
  };
  // The region that holds all of `place`; null if none does.
  const Region* find(const Segments& place) const;
  // A second registration of a region, under a key of its own.
  struct Grant {
    uint64_t group = 0;
    uint32_t number = 0;  // of the region
    MemoryRegion region;
    RemoteRegion remote;  // for the peers
    std::string encoded;  // the same
  };
  // By what peers in this group may write to [data, data + bytes) until revoke_grants(), and how
  // far behind its beginning they lie. Null: they are no memory of ours, or cannot be registered.
  // Valid until the next grant.
  const Grant* grant(uint64_t group, std::byte* data, size_t bytes, uint64_t& offset);
  // When this returns no grant to that group is worth anything, and, if it is OK, no byte is
  // written by one any more: Worker::deregister_memory().
  absl::Status revoke_grants(uint64_t group);
  bool begin_revoke(uint64_t group);  // before that: Worker::begin_deregister()
  // In the order in which they came up; only grows.
  const std::vector<Region>& regions() const { return regions_; }

 private:
  Memory(Worker& worker, std::unique_ptr<MemoryPool> pool, const Limits& limits)
      : limits_(limits), worker_(worker), pool_(std::move(pool)) {}
  bool list_region(const Block& block, size_t most);
  const Limits limits_;
  Worker& worker_;
  std::unique_ptr<MemoryPool> pool_;
  std::vector<Region> regions_;
  std::vector<Grant> grants_;
};

}  // namespace baton::collectives::executor
