// The four messages on the wire, and their checks.
#include "kvtransfer/store/store_messages.h"

#include <cstring>

#include "transport/base/wire.h"

namespace baton::kvtransfer::store {
namespace {

constexpr uint32_t kMagic = 0x31534b42;  // its bytes spell BKS1

enum Kind : uint8_t { kLookup = 1, kFound = 2, kOffer = 3, kTaken = 4 };

void put_key(std::string& out, const tiers::TierKey& key) {
  out.append(reinterpret_cast<const char*>(key.bytes.data()), key.bytes.size());
}

tiers::TierKey take_key(base::WireReader& in) {
  tiers::TierKey key;
  const std::string_view bytes = in.take(key.bytes.size());
  if (!bytes.empty()) std::memcpy(key.bytes.data(), bytes.data(), bytes.size());
  return key;
}

void put_shape(std::string& out, const tiers::TierShape& shape) {
  base::put_number(out, shape.parts);
  base::put_number(out, shape.part_bytes);
}

// False: no store has such records.
bool take_shape(base::WireReader& in, tiers::TierShape* shape) {
  shape->parts = in.number<uint32_t>();
  shape->part_bytes = in.number<uint32_t>();
  return shape->valid() && shape->record_bytes() <= kLargestRecord;
}

bool take_region(base::WireReader& in, RemoteRegion* region) {
  const absl::StatusOr<RemoteRegion> read =
      RemoteRegion::decode(in.take(RemoteRegion::kEncodedBytes));
  if (!read.ok()) return false;
  *region = *read;
  return true;
}

void put(std::string& out, const Lookup& lookup) {
  base::put_number<uint8_t>(out, kLookup);
  base::put_number(out, lookup.id);
  put_shape(out, lookup.shape);
  base::put_number(out, lookup.lease_ms);
  base::put_number(out, static_cast<uint16_t>(lookup.keys.size()));
  for (const tiers::TierKey& key : lookup.keys) put_key(out, key);
}

bool take(base::WireReader& in, Lookup& lookup) {
  lookup.id = in.number<uint64_t>();
  if (!take_shape(in, &lookup.shape)) return false;
  lookup.lease_ms = in.number<uint32_t>();
  const size_t count = in.number<uint16_t>();
  if (count > kMostKeys) return false;
  for (size_t i = 0; i < count && !in.failed(); ++i) lookup.keys.push_back(take_key(in));
  return true;
}

void put(std::string& out, const Found& found) {
  base::put_number<uint8_t>(out, kFound);
  base::put_number(out, found.id);
  out += found.region.encode();
  base::put_number(out, found.base);
  base::put_number(out, static_cast<uint16_t>(found.pages.size()));
  for (uint32_t page : found.pages) base::put_number(out, page);
}

bool take(base::WireReader& in, Found& found) {
  found.id = in.number<uint64_t>();
  if (!take_region(in, &found.region)) return false;
  found.base = in.number<uint64_t>();
  const size_t count = in.number<uint16_t>();
  if (count > kMostKeys || found.base > found.region.size) return false;
  const uint64_t end = (found.region.size - found.base) / tiers::kPage;
  for (size_t i = 0; i < count && !in.failed(); ++i) {
    found.pages.push_back(in.number<uint32_t>());
    if (found.pages.back() != kNotThere && found.pages.back() >= end) return false;
  }
  return true;
}

void put(std::string& out, const Offer& offer) {
  base::put_number<uint8_t>(out, kOffer);
  base::put_number(out, offer.id);
  put_shape(out, offer.shape);
  put_key(out, offer.key);
  out += offer.region.encode();
  base::put_number(out, offer.offset);
}

bool take(base::WireReader& in, Offer& offer) {
  offer.id = in.number<uint64_t>();
  if (!take_shape(in, &offer.shape)) return false;
  offer.key = take_key(in);
  if (!take_region(in, &offer.region)) return false;
  offer.offset = in.number<uint64_t>();
  const size_t bytes = offer.shape.record_bytes();
  return bytes <= offer.region.size && offer.offset <= offer.region.size - bytes;
}

void put(std::string& out, const Taken& taken) {
  base::put_number<uint8_t>(out, kTaken);
  base::put_number(out, taken.id);
  base::put_number(out, static_cast<uint8_t>(taken.fate));
}

bool take(base::WireReader& in, Taken& taken) {
  taken.id = in.number<uint64_t>();
  const uint8_t fate = in.number<uint8_t>();
  taken.fate = static_cast<Fate>(fate);
  return fate <= static_cast<uint8_t>(Fate::kBroken);
}

template <typename Message>
absl::StatusOr<StoreMessage> whole(base::WireReader& in) {
  Message message;
  if (take(in, message) && in.finished()) return StoreMessage(std::move(message));
  return absl::DataLossError("a message to or from a KV store has values out of range");
}

}  // namespace

std::string encode(const StoreMessage& message) {
  std::string out;
  base::put_number(out, kMagic);
  std::visit([&](const auto& m) { put(out, m); }, message);
  return out;
}

absl::StatusOr<StoreMessage> decode_store_message(std::string_view bytes) {
  base::WireReader in(bytes);
  const uint32_t magic = in.number<uint32_t>();
  const uint8_t kind = in.number<uint8_t>();
  if (!in.failed() && magic == kMagic) {
    if (kind == kLookup) return whole<Lookup>(in);
    if (kind == kFound) return whole<Found>(in);
    if (kind == kOffer) return whole<Offer>(in);
    if (kind == kTaken) return whole<Taken>(in);
  }
  return absl::DataLossError(
      "not a message to or from a KV store of this version: run the same Baton at both ends");
}

}  // namespace baton::kvtransfer::store
