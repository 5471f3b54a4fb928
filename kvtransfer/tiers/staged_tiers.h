// Tiers below a cache that lies on a device, which the threads of a store cannot read: a few blocks
// of pinned host memory stand for it. What is saved is copied there first, and what is loaded last
// goes from there to the device, with the checks of any other load behind it.
//
// The engine keeps a block that is to be saved only until its copy has ended. A load of more blocks
// than there are places is done in pieces, one after the other, so that its first layer is there
// with its last piece.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "kvtransfer/tiers/tier_store.h"
#include "transport/internal/device_memory.h"

namespace baton::kvtransfer::tiers {

class StagedTiers final : public TierStore {
 public:
  // `options.cache` lies on that device, of `memory`, which outlives this. Otherwise as
  // TierStore::open(), and the text of the device provider.
  static absl::StatusOr<std::unique_ptr<TierStore>> open(const TierStoreOptions& options,
                                                         const internal::DeviceMemory& memory,
                                                         int device);
  // When no step of the engine runs. Waits for copies that have begun.
  ~StagedTiers() override = default;

  bool is_on() const override { return store_->is_on() && ring_->alive().ok(); }
  TierFound find(std::span<const TierKey> keys) override { return store_->find(keys); }
  TierFound find_known(std::span<const TierKey> keys) override { return store_->find_known(keys); }
  size_t save(std::span<const TierSave> saves) override;
  std::vector<uint32_t> unpinned() override;
  bool has_pinned() const override;
  TierLoadId load(std::span<const TierKey> keys, std::span<const uint32_t> blocks,
                  Time timeout) override;
  uint32_t layers_loaded(TierLoadId id) override;
  absl::Status load_status(TierLoadId id) override;
  bool end_load(TierLoadId id) override;
  void wait(Time timeout, int fd) override;
  void flush() override;
  TierStats stats() const override { return store_->stats(); }
  std::string explain() const override;

 private:
  // Places of the host's memory, by number.
  struct Places {
    std::vector<uint32_t> free;
    uint32_t count = 0;
  };
  struct Save {
    TierSave of;
    uint32_t place = 0;
  };
  struct Load {
    std::vector<TierKey> keys;
    std::vector<uint32_t> blocks;
    Time deadline{};
    // The piece that is under way: of its blocks [first, first + places.size()).
    size_t first = 0;
    std::vector<uint32_t> places;
    TierLoadId piece = 0;
    uint32_t asked = 0;   // layers whose copies have begun
    uint32_t there = 0;   // layers whose copies have ended
    uint32_t copies = 0;  // that have not ended
    bool ending = false;
    absl::Status status;
    bool whole() const { return first == blocks.size(); }
  };

  StagedTiers(const TierStoreOptions& options, std::unique_ptr<internal::StagingRing> ring,
              const Clock& clock)
      : cache_(options.cache), ring_(std::move(ring)), clock_(clock) {}
  TierCache staging() const;
  std::vector<internal::CopyRun> runs(uint32_t layer, const Load& load) const;
  void ended(uint64_t cookie, const absl::Status& status);
  // Looks what has ended, and goes on with it.
  void progress();
  void hand_over_saves();
  void advance(TierLoadId id, Load& load);
  // Ends the piece; true when no copy uses its places any more.
  bool end_piece(Load& load);

  const TierCache cache_;  // on the device
  // In this order: the store's threads read what the ring has.
  const std::unique_ptr<internal::StagingRing> ring_;
  const Clock& clock_;
  std::unique_ptr<TierStore> store_;  // below the ring's blocks
  Places for_saves_, for_loads_;
  uint64_t next_ = 1;                            // name of a copy, or of a load
  absl::flat_hash_map<uint64_t, Save> copying_;  // by copy
  std::deque<Save> copied_;                      // not taken by the store yet
  std::vector<uint32_t> unpinned_;
  absl::flat_hash_map<TierLoadId, Load> loads_;
  absl::flat_hash_map<uint64_t, TierLoadId> copies_of_loads_;  // by copy
};

}  // namespace baton::kvtransfer::tiers
