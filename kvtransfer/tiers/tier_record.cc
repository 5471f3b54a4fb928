// Headers and checksums of records, on XXH3.
#include "kvtransfer/tiers/tier_record.h"

#include <openssl/sha.h>

#include <bit>
#include <cstddef>
#include <cstring>

#include "transport/base/threads/forks.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace baton::kvtransfer::tiers {
namespace {

static_assert(std::endian::native == std::endian::little, "records are little endian");

constexpr uint64_t kMagic = 0x31304b564e544142;  // its bytes spell BATNVK01

uint64_t sum_of_part(const TierKey& key, uint32_t part, std::span<const std::byte> bytes) {
  const uint64_t seed = key.short_hash() ^ (uint64_t{part} + 1) * 0x9e3779b97f4a7c15;
  return XXH3_64bits_withSeed(bytes.data(), bytes.size(), seed);
}

uint64_t sum_of_header(const RecordHeader& header) {
  return XXH3_64bits(&header, offsetof(RecordHeader, header_sum));
}

}  // namespace

AlignedBytes aligned_bytes(size_t size) {
  AlignedBytes memory(static_cast<std::byte*>(std::aligned_alloc(kPage, size)));
  if (memory != nullptr) std::memset(memory.get(), 0, size);
  return memory;
}

bool is_header(const RecordHeader& header, const TierShape& shape) {
  return header.magic == kMagic && header.shape == shape &&
         header.header_sum == sum_of_header(header);
}

bool is_part(const RecordHeader& header, uint32_t part, std::span<const std::byte> bytes) {
  return part < header.shape.parts && bytes.size() == header.shape.part_bytes &&
         header.sums[part] == sum_of_part(header.key, part, bytes);
}

bool is_record(std::span<const std::byte> bytes, const TierShape& shape) {
  RecordHeader header;
  if (bytes.size() != shape.record_bytes()) return false;
  std::memcpy(&header, bytes.data(), sizeof(header));
  if (!is_header(header, shape)) return false;
  for (uint32_t i = 0; i < shape.parts; ++i) {
    if (!is_part(header, i, bytes.subspan(shape.part_offset(i), shape.part_bytes))) return false;
  }
  return true;
}

std::span<const std::byte> checked_part(std::span<const std::byte> bytes, const TierShape& shape,
                                        uint32_t part, RecordHeader* header) {
  if (bytes.size() != read_bytes(shape, part)) return {};
  if (part == 0) {
    RecordHeader read;
    std::memcpy(&read, bytes.data(), sizeof(read));
    if (read.key == header->key) *header = read;  // only that of the record that is wanted
  }
  const auto meant =
      bytes.subspan(shape.part_offset(part) - read_offset(shape, part), shape.part_bytes);
  if (!is_header(*header, shape) || !is_part(*header, part, meant)) return {};
  return meant;
}

std::shared_ptr<TierRecord> TierRecord::make(const TierShape& shape) {
  AlignedBytes memory = aligned_bytes(shape.record_bytes());
  if (memory == nullptr) return nullptr;
  return std::shared_ptr<TierRecord>(new TierRecord(shape, std::move(memory)));
}

void TierRecord::seal(const TierKey& key, uint64_t sequence) {
  RecordHeader header;
  header.magic = kMagic;
  header.key = key;
  header.sequence = sequence;
  header.shape = shape_;
  for (uint32_t i = 0; i < shape_.parts; ++i) header.sums[i] = sum_of_part(key, i, part(i));
  header.header_sum = sum_of_header(header);
  std::memcpy(memory_.get(), &header, sizeof(header));
}

// Fingerprints on OpenSSL's SHA-256: fields with their lengths before them, so that none runs into
// the next.

namespace {

void append(std::string_view field, std::string* out) {
  const uint64_t size = field.size();
  out->append(reinterpret_cast<const char*>(&size), sizeof(size));
  out->append(field);
}

TierKey digest(const std::string& text) {
  const base::ForkWaits fork_waits(base::ForkWaits::kMoment);  // OpenSSL has locks
  TierKey key;
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), key.bytes.data());
  return key;
}

}  // namespace

TierKeys::TierKeys(const TierIdentity& identity) {
  std::string text;
  append("baton kv tier 1", &text);
  for (const std::string* field :
       {&identity.weights, &identity.tokenizer, &identity.dtype, &identity.layout, &identity.shard,
        &identity.adapter, &identity.salt}) {
    append(*field, &text);
  }
  identity_ = digest(text);
}

TierKey TierKeys::key(std::string_view chained) const {
  std::string text(reinterpret_cast<const char*>(identity_.bytes.data()), identity_.bytes.size());
  append(chained, &text);
  return digest(text);
}

}  // namespace baton::kvtransfer::tiers
