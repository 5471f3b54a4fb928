// What rank 0's KV tiers have those of the other ranks do, and what they say of it, as bytes.
//
// A block is named as rank 0 names it for all ranks; each makes its own name of that (RankKeys).
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/model/shard.h"
#include "kvtransfer/tiers/tier_key.h"
#include "kvtransfer/tiers/tier_store.h"
#include "transport/base/wire.h"
#include "transport/clock.h"

namespace baton::engine::shard {

// A rank's names of blocks: its rank and the number of ranks are in them, so that no rank finds
// other heads than its own, in whatever store or directory they meet.
class RankKeys {
 public:
  explicit RankKeys(const ModelShard& shard);
  kvtransfer::tiers::TierKey of(const kvtransfer::tiers::TierKey& block) const;
  std::vector<kvtransfer::tiers::TierKey> of(
      std::span<const kvtransfer::tiers::TierKey> blocks) const;

 private:
  kvtransfer::tiers::TierKeys keys_;
};

enum class TierCallKind : uint8_t {
  kFind = 1,  // how many of `keys`, from the first on, are here
  kSave,      // keys[0] is what blocks[0] holds
  kLoad,      // TierStore::load()
  kEndLoad,   // end_load() of `id`, again and again until that is true
  kFlush,     // TierStore::flush(); for tests
};

// Each has a number of its own, but kEndLoad, which has that of the load.
struct TierCall {
  TierCallKind kind = TierCallKind::kFlush;
  uint64_t id = 0;
  std::vector<kvtransfer::tiers::TierKey> keys;  // kFind, kSave, kLoad
  std::vector<uint32_t> blocks;                  // kSave, kLoad
  Time timeout{};                                // kLoad

  void encode(std::string& out) const;  // appends
  // A reader that has failed afterwards has read no call.
  static TierCall decode(base::WireReader& reader);
};

enum class TierEventKind : uint8_t {
  kFound = 1,   // to kFind: `found`
  kUnpinned,    // to kSave: the block is not read any more, saved or not
  kLoaded,      // to kLoad: every layer is here
  kLoadFailed,  // ... it will never be, and why
  kLoadQuiet,   // to kEndLoad: nothing writes to its blocks any more, and the number is forgotten
};

struct TierEvent {
  TierEventKind kind = TierEventKind::kUnpinned;
  uint64_t id = 0;
  kvtransfer::tiers::TierFound found;
  absl::Status why;
};

// What one rank says of these, each time in equally many bytes.
struct TierReport {
  static constexpr size_t kBytes = 1024;

  kvtransfer::tiers::TierStats stats;  // host_bytes, and what went wrong; the rest is zero
  std::vector<TierEvent> events;       // each is told once
  bool more = false;                   // there are others: ask again

  // Takes from `events` what finds room.
  static std::string encode(const kvtransfer::tiers::TierStats& stats,
                            std::deque<TierEvent>& events);
  // Internal: bytes that no rank of this version sends. Zeros are a rank without tiers.
  static absl::StatusOr<TierReport> decode(std::string_view bytes);
};

}  // namespace baton::engine::shard
