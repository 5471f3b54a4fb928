// Records with content that follows from a number, for the tests of tiers.
#pragma once

#include <cstring>
#include <memory>
#include <string>

#include "kvtransfer/tiers/tier_record.h"
#include "transport/base/splitmix.h"

namespace baton::kvtransfer::tiers {

inline TierKey key_of(uint64_t number) {
  static const TierKeys keys({.weights = "w", .dtype = "bf16"});
  return keys.key(std::to_string(number));
}

inline std::byte content(uint64_t number, size_t at) {
  return static_cast<std::byte>(base::splitmix(number * 1000003 + at));
}

inline std::shared_ptr<TierRecord> record_of(uint64_t number, const TierShape& shape) {
  std::shared_ptr<TierRecord> record = TierRecord::make(shape);
  for (uint32_t part = 0; part < shape.parts; ++part) {
    for (size_t i = 0; i < shape.part_bytes; ++i) {
      record->part(part)[i] = content(number, part * shape.part_bytes + i);
    }
  }
  record->seal(key_of(number), number + 1);
  return record;
}

}  // namespace baton::kvtransfer::tiers
