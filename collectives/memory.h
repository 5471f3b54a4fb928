// The memory of a communicator: pool blocks for callers and for staging, and whether a pointer of a
// caller lies in it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "collectives/segments.h"
#include "transport/pool.h"
#include "transport/worker.h"

namespace baton::collectives {

class Memory {
 public:
  static absl::StatusOr<std::unique_ptr<Memory>> create(Worker& worker);

  // Zeroed.
  absl::StatusOr<Block> allocate(size_t bytes);
  void free(const Block& block) { pool_->free(block); }

  // A registered region of ours.
  struct Region {
    MemoryRegion local;
    uint32_t number = 0;  // of regions(), from 0
  };
  // The region that holds all of `place`; null if none does.
  const Region* find(const Segments& place) const;
  // In the order in which they came up; only grows.
  const std::vector<Region>& regions() const { return regions_; }

 private:
  explicit Memory(std::unique_ptr<MemoryPool> pool) : pool_(std::move(pool)) {}
  std::unique_ptr<MemoryPool> pool_;
  std::vector<Region> regions_;
};

}  // namespace baton::collectives
