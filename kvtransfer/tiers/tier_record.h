// A KV block as tiers hold it: a header of one page, then parts of equal size.
//
// A part is what some consecutive layers of the block hold: a load brings part 0 of all its blocks
// first, then part 1, so that the first layers can be computed while the others are on their way.
// Each part has a checksum that its key and number go into: bytes of another block, or of another
// part, do not pass for it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace baton::kvtransfer::tiers {

// Names of KV blocks that may outlive a process: a fingerprint of all that the bytes depend on.
//
//   const TierKeys keys({.weights = model.fingerprint(), .dtype = "bf16", .layout = "..."});
//   TierKey key = keys.key(chained_hash_of_the_block);
//
// Two blocks have one key only where every field below and the chained hash (the block's tokens and
// all tokens before them) are equal. A field that an engine has no use for stays empty.

// What the bytes of a block follow from, besides its tokens.
struct TierIdentity {
  std::string weights;    // a hash over weights and config
  std::string tokenizer;  // that made the tokens, where their numbers do not say it all
  std::string dtype;      // of K and V
  std::string layout;     // how a block's bytes are ordered
  std::string shard;      // which heads and layers of the model
  std::string adapter;    // LoRA or the like
  std::string salt;       // of a tenant: equal prompts of two are not shared
};

// SHA-256: no attacker can make two that are equal.
struct TierKey {
  std::array<uint8_t, 32> bytes{};

  friend bool operator==(const TierKey&, const TierKey&) = default;
  // Eight of its bytes, which are as good as random.
  uint64_t short_hash() const {
    uint64_t value;
    std::memcpy(&value, bytes.data(), sizeof(value));
    return value;
  }
  template <typename H>
  friend H AbslHashValue(H state, const TierKey& key) {
    return H::combine(std::move(state), key.short_hash());
  }
};

// Keys of one identity. Immutable: any thread may call.
class TierKeys {
 public:
  explicit TierKeys(const TierIdentity& identity);
  // `chained` stands for the block's tokens and all before them: a hash that no attacker can forge.
  TierKey key(std::string_view chained) const;

 private:
  TierKey identity_;
};

inline constexpr size_t kPage = 4096;  // what O_DIRECT asks for on every disk of today
inline constexpr uint32_t kMaxParts = 64;

struct AlignedFree {
  void operator()(std::byte* memory) const { std::free(memory); }
};
using AlignedBytes = std::unique_ptr<std::byte[], AlignedFree>;
// A multiple of kPage, aligned to it, zeroed. Null: no memory.
AlignedBytes aligned_bytes(size_t size);

// The parts of every record of a store.
struct TierShape {
  uint32_t parts = 1;       // at most kMaxParts
  uint32_t part_bytes = 0;  // that mean something

  // With what fills the last page of a part.
  size_t part_stride() const { return (size_t{part_bytes} + kPage - 1) / kPage * kPage; }
  size_t record_bytes() const { return kPage + parts * part_stride(); }
  size_t part_offset(uint32_t part) const { return kPage + part * part_stride(); }
  bool valid() const { return parts >= 1 && parts <= kMaxParts && part_bytes >= 1; }
  friend bool operator==(const TierShape&, const TierShape&) = default;
};

// The first bytes of a record, on every tier and on the wire. Little endian.
struct RecordHeader {
  uint64_t magic = 0;
  TierKey key;
  uint64_t sequence = 0;  // records written later have larger ones
  TierShape shape;
  std::array<uint64_t, kMaxParts> sums{};  // of the parts
  uint64_t header_sum = 0;                 // of all before it
};
static_assert(sizeof(RecordHeader) <= kPage);

// Whether these bytes begin a record of this shape that was written whole.
bool is_header(const RecordHeader& header, const TierShape& shape);
// Whether `part` of the record that `header` begins has these bytes.
bool is_part(const RecordHeader& header, uint32_t part, std::span<const std::byte> bytes);

// Whether these bytes are a record of this shape, whole.
bool is_record(std::span<const std::byte> bytes, const TierShape& shape);

// Where a part begins that is read together with what a reader needs to check it: part 0 with the
// header before it.
inline size_t read_offset(const TierShape& shape, uint32_t part) {
  return part == 0 ? 0 : shape.part_offset(part);
}
inline size_t read_bytes(const TierShape& shape, uint32_t part) {
  return shape.part_offset(part) + shape.part_stride() - read_offset(shape, part);
}
// The part among bytes that were read so, or none if they are not those of the record. `header` has
// the key that is wanted; it takes the rest from part 0, for the other parts.
std::span<const std::byte> checked_part(std::span<const std::byte> bytes, const TierShape& shape,
                                        uint32_t part, RecordHeader* header);

// A record in memory: filled by one thread, sealed, then shared and never changed.
class TierRecord {
 public:
  // Null: no memory.
  static std::shared_ptr<TierRecord> make(const TierShape& shape);

  RecordHeader& header() { return *reinterpret_cast<RecordHeader*>(memory_.get()); }
  const RecordHeader& header() const {
    return *reinterpret_cast<const RecordHeader*>(memory_.get());
  }
  std::span<std::byte> part(uint32_t part) {
    return {memory_.get() + shape_.part_offset(part), shape_.part_bytes};
  }
  std::span<const std::byte> part(uint32_t part) const {
    return {memory_.get() + shape_.part_offset(part), shape_.part_bytes};
  }
  // Header and parts, as they are written.
  std::span<std::byte> bytes() { return {memory_.get(), shape_.record_bytes()}; }
  std::span<const std::byte> bytes() const { return {memory_.get(), shape_.record_bytes()}; }

  // Writes the header and the sums of the parts.
  void seal(const TierKey& key, uint64_t sequence);
  // Whether all of it is what was sealed.
  bool is_whole() const { return is_record(bytes(), shape_); }

 private:
  TierRecord(const TierShape& shape, AlignedBytes memory)
      : shape_(shape), memory_(std::move(memory)) {}

  TierShape shape_;
  AlignedBytes memory_;
};

}  // namespace baton::kvtransfer::tiers
