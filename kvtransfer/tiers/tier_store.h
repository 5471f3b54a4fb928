// Tiers below an engine's KV cache: blocks that it has no room for, kept in host memory, on disk
// and in another process, and brought back part by part.
//
//   auto store = TierStore::open({.cache = {base, layers, blocks, block_bytes},
//                                 .host_bytes = 8ull << 30, .disk = "/nvme/kv"});
//   store->save({{key, block}});                   // in the background; see unpinned()
//   size_t found = store->find(keys);              // how many of the first ones are here
//   auto load = store->load(keys, blocks, timeout);
//   store->layers_loaded(load) ...                 // grows while layers arrive
//   store->end_load(load);
//
// What is promised: the engine sees bytes that were saved under their key, whole, or none. Each
// part of a record is checked (XXH3, with its key and number) before it is copied into the cache; a
// record that is torn, flipped, cut or of another identity is a miss. No call here blocks on a
// disk: threads of the store's do the work. Where a tier fails it is off, one line of the log says
// so, and loads end with an error: the engine computes.
//
// Threads: one engine thread calls everything; stats() may come from any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvtransfer/tiers/peer_tier.h"
#include "kvtransfer/tiers/tier_record.h"
#include "transport/clock.h"

namespace baton::kvtransfer::tiers {

// The cache of the engine: [layer][block], each block_bytes; in host memory, or on a device. It
// must outlive the store.
struct TierCache {
  std::byte* base = nullptr;
  uint32_t layers = 0;
  uint32_t blocks = 0;
  size_t block_bytes = 0;  // of one block of one layer

  std::span<std::byte> at(uint32_t layer, uint32_t block) const {
    return {base + (size_t{layer} * blocks + block) * block_bytes, block_bytes};
  }
};

struct TierStoreOptions {
  TierCache cache;
  size_t host_bytes = 0;  // 0: no tier in host memory
  std::string disk;       // a directory; empty: no tier on disk
  size_t disk_bytes = 0;
  PeerTierFactory peer;           // none: no tier in another process
  size_t part_bytes = 256 << 10;  // of consecutive layers that are loaded at a time, about
  size_t pinned_blocks = 32;      // of the engine's, at most, while they are being copied
  const Clock* clock = nullptr;   // default: Clock::steady()
};

struct TierStats {
  uint64_t host_records = 0;
  uint64_t host_bytes = 0;
  uint64_t disk_records = 0;
  uint64_t saved = 0;      // blocks that were copied out of the cache
  uint64_t dropped = 0;    // blocks that were not, because the tiers are busy
  uint64_t evicted = 0;    // from a tier, to make room in it
  uint64_t loaded = 0;     // blocks that came back
  uint64_t from_host = 0;  // of them
  uint64_t from_disk = 0;
  uint64_t from_peer = 0;
  uint64_t silences = 0;  // times that the other process did not answer in time
  uint64_t missed = 0;    // blocks of loads that had gone meanwhile
  uint64_t corrupt = 0;   // records that were not what was written
};

// Where blocks of a chain were found.
struct TierFound {
  size_t blocks = 0;     // of the chain's start
  size_t peer = 0;       // of them, those in another process
  bool pending = false;  // the other process has been asked: ask again after the next wait()
};

struct TierSave {
  TierKey key;
  uint32_t block = 0;
};

using TierLoadId = uint64_t;  // 0: none

class TierStore {
 public:
  // A tier that cannot be opened is left out and a line of the log says why; the store works with
  // the others, or with none. InvalidArgument: a cache without layers or
  // bytes, and what a peer tier says of an address that cannot be one.
  static absl::StatusOr<std::unique_ptr<TierStore>> open(const TierStoreOptions& options);
  virtual ~TierStore() = default;

  // Whether any tier is there.
  virtual bool is_on() const = 0;

  // How many of these keys, from the first on, are here now. Reads no disk and waits for nothing.
  virtual TierFound find(std::span<const TierKey> keys) = 0;
  // The same by what is known already, here and of others: asks no store, and is never pending.
  virtual TierFound find_known(std::span<const TierKey> keys) = 0;

  // Copies blocks of the cache out, in the background. The engine keeps each block as it is until
  // unpinned() has named it. Returns how many of them were taken, from the first on; a block that
  // the tiers have already is taken and unpinned at once.
  virtual size_t save(std::span<const TierSave> saves) = 0;
  // Blocks that the store does not read any more, since the last call.
  virtual std::vector<uint32_t> unpinned() = 0;
  // Whether it still reads some.
  virtual bool has_pinned() const = 0;

  // Brings keys[i] into block blocks[i] of the cache. The blocks are the load's until end_load()
  // has returned true.
  virtual TierLoadId load(std::span<const TierKey> keys, std::span<const uint32_t> blocks,
                          Time timeout) = 0;
  // How many layers, counted from layer 0, are here completely.
  virtual uint32_t layers_loaded(TierLoadId id) = 0;
  // OK while under way and when complete; otherwise why the KV will not come.
  virtual absl::Status load_status(TierLoadId id) = 0;
  // Ends a load, complete or not. True when nothing writes to its blocks any more; false: call
  // again.
  virtual bool end_load(TierLoadId id) = 0;

  // Sleeps until something of the above may have changed, at most `timeout`. `fd` (or -1) also ends
  // the sleep when readable.
  virtual void wait(Time timeout, int fd) = 0;
  // Blocks until all that was saved is where it belongs. For tests, and before a clean end.
  virtual void flush() = 0;

  virtual TierStats stats() const = 0;
  virtual std::string explain() const = 0;
};

}  // namespace baton::kvtransfer::tiers
