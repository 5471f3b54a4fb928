// Cuts the flat array of parameters into buckets.
#include "engine/train/data_parallel/buckets.h"

#include <algorithm>

namespace baton::engine::train {
namespace {

size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

size_t padded_size(size_t size, int ranks) {
  return round_up(size, kNormBlock * static_cast<size_t>(ranks));
}

std::vector<FlatRange> cut_buckets(const ParameterMap& map, int ranks, size_t bytes) {
  constexpr size_t kLeastBytes = 64 << 10;
  constexpr size_t kShare = 24;  // small, so that little is left to send when backward ends
  const size_t unit = kNormBlock * static_cast<size_t>(ranks);
  const size_t all = padded_size(map.size, ranks);
  if (bytes == 0) bytes = std::max(kLeastBytes, all * sizeof(float) / kShare);
  const size_t whole = round_up(std::max(bytes / sizeof(float), size_t{1}), unit);
  const size_t embedding = map.embedding.offset / unit * unit;
  std::vector<FlatRange> buckets;
  for (size_t begin = 0; begin < all;) {
    size_t end = std::min(all, begin + (begin == 0 ? round_up(whole / 4, unit) : whole));
    if (begin < embedding) end = std::min(end, embedding);
    buckets.push_back({begin, end});
    begin = end;
  }
  return buckets;
}

FlatRange part_of(const FlatRange& bucket, int rank, int ranks) {
  const size_t part = bucket.size() / static_cast<size_t>(ranks);
  const size_t begin = bucket.begin + static_cast<size_t>(rank) * part;
  return {begin, begin + part};
}

}  // namespace baton::engine::train
