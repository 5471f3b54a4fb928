// What an engine and a KV store tell each other, in notifications of Baton's transport.
//
//   engine -> store   lookup   are these records there? keep those that are for `lease`
//   store -> engine   found    where each begins in the store's region, which the engine reads
//   engine -> store   offer    a record lies at this place of mine: read it
//   store -> engine   taken    what became of that; the place is the engine's again
//
// Bytes are never written into the other's memory: each side reads. What was read is believed only
// where its sums, which are seeded with its key, are right. Little endian, one message in each
// notification; decode_store_message() believes nothing of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "kvtransfer/tiers/tier_record.h"
#include "transport/base/fields.h"
#include "transport/region.h"

namespace baton::kvtransfer::store {

inline constexpr size_t kMostKeys = 1900;          // of one lookup: one notification
inline constexpr uint32_t kNotThere = UINT32_MAX;  // in place of a page
// What a record may have at most, in bytes: with all parts.
inline constexpr size_t kLargestRecord = size_t{1} << 30;

// Whether a store has such records.
inline bool is_kept(const tiers::TierShape& shape) {
  return shape.valid() && shape.record_bytes() <= kLargestRecord;
}

struct Lookup {
  uint64_t id = 0;
  tiers::TierShape shape;
  uint32_t lease_ms = 0;
  std::vector<tiers::TierKey> keys;  // none: only to see whether the store answers
  static void fields(auto& wire, auto& m) {
    wire(m.id, m.shape, m.lease_ms);
    wire.brief(m.keys, kMostKeys);
    wire.require(is_kept(m.shape));
  }
};

struct Found {
  uint64_t id = 0;  // of the lookup
  RemoteRegion region;
  uint64_t base = 0;            // of page 0, in bytes from the region's start
  std::vector<uint32_t> pages;  // for each key: its record begins at base + page * tiers::kPage
  static void fields(auto& wire, auto& m) {
    wire(m.id, m.region, m.base);
    wire.brief(m.pages, kMostKeys);
    wire.require(m.base <= m.region.size);
    for (const uint32_t page : m.pages) {
      wire.require(page == kNotThere || page < (m.region.size - m.base) / tiers::kPage);
    }
  }
};

struct Offer {
  uint64_t id = 0;
  tiers::TierShape shape;
  tiers::TierKey key;
  RemoteRegion region;
  uint64_t offset = 0;
  static void fields(auto& wire, auto& m) {
    wire(m.id, m.shape, m.key, m.region, m.offset);
    const size_t bytes = is_kept(m.shape) ? m.shape.record_bytes() : SIZE_MAX;
    wire.require(bytes <= m.region.size && m.offset <= m.region.size - bytes);
  }
};

// kFull: nothing may make room for it now. kBroken: what was read was not the record, or nothing.
enum class Fate : uint8_t { kTaken = 0, kHad = 1, kFull = 2, kBroken = 3 };

struct Taken {
  uint64_t id = 0;  // of the offer
  Fate fate = Fate::kTaken;
  static void fields(auto& wire, auto& m) {
    auto fate = static_cast<uint8_t>(m.fate);
    wire(m.id, fate);
    wire.require(fate <= static_cast<uint8_t>(Fate::kBroken));
    if constexpr (requires { m.fate = Fate(); }) m.fate = static_cast<Fate>(fate);
  }
};

// A byte before each says its place here, from 1.
using StoreMessage = std::variant<Lookup, Found, Offer, Taken>;

std::string encode(const StoreMessage& message);
// DataLoss: not a message, of another version, or numbers that cannot be.
absl::StatusOr<StoreMessage> decode_store_message(std::string_view bytes);

}  // namespace baton::kvtransfer::store
