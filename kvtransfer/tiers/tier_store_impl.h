// The store's inside: its tiers, a thread that saves (tier_store.cc), a thread that loads
// (tier_loads.cc).
#pragma once

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "kvtransfer/tiers/disk_tier.h"
#include "kvtransfer/tiers/memory_tier.h"
#include "kvtransfer/tiers/tier_store.h"
#include "transport/base/limits/event_fd.h"

namespace baton::kvtransfer::tiers {

// One load. The loading thread writes the cache; `touching` says that it may be doing so.
struct Load {
  std::vector<TierKey> keys;
  std::vector<uint32_t> blocks;
  Time deadline{};
  bool from_peer = false;
  uint32_t layers = 0;
  absl::Status status;
  bool ended = false;     // by the engine: nothing may be written any more
  bool touching = false;  // the loading thread has it
};

// What a load reads a block from, found when it begins.
struct Source {
  std::shared_ptr<const TierRecord> record;
  std::optional<DiskTier::Pin> pin;
  std::optional<PeerTier::Pin> peer;
};

class Store final : public TierStore {
 public:
  explicit Store(const TierStoreOptions& options)
      : options_(options),
        clock_(options.clock != nullptr ? *options.clock : Clock::steady()),
        layers_per_part_(layers_per_part(options)),
        shape_{.parts = (options.cache.layers + layers_per_part_ - 1) / layers_per_part_,
               .part_bytes = static_cast<uint32_t>(layers_per_part_ * options.cache.block_bytes)} {}
  ~Store() override;
  absl::Status start();

  bool is_on() const override { return memory_ != nullptr || disk_ != nullptr || peer_ != nullptr; }
  TierFound find(std::span<const TierKey> keys) override;
  TierFound find_known(std::span<const TierKey> keys) override;
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
  TierStats stats() const override;
  std::string explain() const override;

 private:
  static uint32_t layers_per_part(const TierStoreOptions& options) {
    const size_t wanted = std::max<size_t>(1, options.part_bytes / options.cache.block_bytes);
    const size_t least = (options.cache.layers + kMaxParts - 1) / kMaxParts;
    return static_cast<uint32_t>(
        std::clamp<size_t>(std::max(wanted, least), 1, options.cache.layers));
  }
  uint32_t end_of_part(uint32_t part) const {
    return std::min((part + 1) * layers_per_part_, options_.cache.layers);
  }
  bool has(const TierKey& key) const {
    return (memory_ == nullptr || memory_->contains(key)) &&
           (disk_ == nullptr || disk_->contains(key)) && (peer_ == nullptr || !peer_->wants(key));
  }
  void notify();
  void save_loop();
  std::shared_ptr<TierRecord> copy_out(const TierSave& save);
  void store(const std::shared_ptr<TierRecord>& record);
  bool is_near(const TierKey& key) const {
    return (memory_ != nullptr && memory_->contains(key)) ||
           (disk_ != nullptr && disk_->contains(key));
  }
  void load_loop(bool from_peer);
  void run(Load& load);
  bool find_sources(const Load& load, std::vector<Source>* sources);
  size_t load_part(Load& load, std::vector<Source>& sources, uint32_t part);
  size_t read_disk(Load& load, std::vector<Source>& sources, uint32_t part);
  size_t read_peer(Load& load, std::vector<Source>& sources, uint32_t part);
  bool copy_in(Load& load, size_t number, uint32_t part, std::span<const std::byte> bytes);
  void end(Load& load, absl::Status status);

  const TierStoreOptions options_;
  const Clock& clock_;
  const uint32_t layers_per_part_;
  const TierShape shape_;
  base::EventFd event_;
  std::unique_ptr<MemoryTier> memory_;
  std::unique_ptr<DiskTier> disk_;

  std::mutex disk_reads_;  // the two loading threads'
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;
  std::deque<TierSave> saves_;
  bool saving_ = false;
  std::vector<uint32_t> unpinned_;
  size_t pinned_ = 0;
  uint64_t sequence_ = 0;
  absl::flat_hash_map<TierLoadId, std::shared_ptr<Load>> loads_;
  std::deque<std::shared_ptr<Load>> queue_;
  std::deque<std::shared_ptr<Load>> peer_queue_;  // no load waits behind another process
  TierLoadId next_load_ = 1;
  TierStats stats_;
  std::thread saver_, loader_, peer_loader_;
  std::unique_ptr<PeerTier> peer_;  // calls notify(): gone first
};

}  // namespace baton::kvtransfer::tiers
