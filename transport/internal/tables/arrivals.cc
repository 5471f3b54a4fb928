// The target's side of a write: adds up the slices of each incoming transfer.
#include "transport/internal/tables/arrivals.h"

#include <algorithm>

#include "absl/strings/str_format.h"

namespace baton::internal {
namespace {
// A sender uses the same few slots again and again: a table soon has them all, and a peer that says
// little costs little.
constexpr size_t kFirstSlots = 512;
}  // namespace

bool Arrivals::Completed::holds(uint32_t generation) const {
  const auto behind = static_cast<int32_t>(newest - generation);
  if (newest == 0 || behind < 0) return false;
  if (behind == 0) return true;
  if (behind > static_cast<int32_t>(kRemembered)) return false;
  return (before >> (behind - 1) & 1) != 0;
}

void Arrivals::Completed::add(uint32_t generation) {
  const auto ahead = static_cast<int32_t>(generation - newest);
  if (newest == 0) {
    newest = generation;
  } else if (ahead > 0) {
    before = static_cast<uint32_t>((uint64_t{before} << 1 | 1) << std::min(ahead - 1, 32));
    newest = generation;
  } else if (-ahead <= static_cast<int32_t>(kRemembered)) {
    before |= uint32_t{1} << (-ahead - 1);
  }
}

absl::StatusOr<Arrivals::Complete> Arrivals::add(const Arrival& arrival) {
  const auto [slot, generation] = arrival.transfer;
  if (arrival.slice_bytes > arrival.total_bytes || arrival.slice >= kMaxSlices ||
      slot >= kMaxSlots) {
    return absl::InvalidArgumentError("the peer described an impossible slice");
  }
  if (slot >= completed_.size()) {
    completed_.resize(std::max({kFirstSlots, size_t{slot} + 1, 2 * completed_.size()}));
  }
  if (completed_[slot].holds(generation)) return Complete{};
  if (arrival.slice_bytes == arrival.total_bytes) {
    completed_[slot].add(generation);
    return Complete{true, arrival.notify};
  }

  const uint32_t place = place_of(arrival.transfer);
  auto it = open_.find(place);
  if (it == open_.end()) {
    Partial fresh;
    if (!spare_.empty()) {
      fresh = std::move(spare_.back());
      spare_.pop_back();
    }
    it = open_.emplace(place, std::move(fresh)).first;
    it->second.generation = generation - 1;
  }
  Partial& partial = it->second;
  if (static_cast<int32_t>(generation - partial.generation) < 0) return Complete{};
  if (partial.generation != generation) {
    partial.generation = generation;
    partial.total = arrival.total_bytes;
    partial.bytes = 0;
    text_ -= partial.notify.size();
    partial.notify.clear();
    partial.seen.assign((kMaxSlices + 63) / 64, 0);
  }
  if (partial.total != arrival.total_bytes) {
    return absl::InvalidArgumentError("the peer changed the size of a transfer in progress");
  }
  uint64_t& word = partial.seen[arrival.slice / 64];
  const uint64_t bit = uint64_t{1} << (arrival.slice % 64);
  if (word & bit) return Complete{};
  word |= bit;
  partial.bytes += arrival.slice_bytes;
  if (!arrival.notify.empty()) {
    text_ += arrival.notify.size() - partial.notify.size();
    partial.notify.assign(arrival.notify);
    if (text_ > kMaxText) {
      return absl::InvalidArgumentError("the peer began more notifications than it has credit for");
    }
  }
  if (partial.bytes > partial.total) {
    return absl::InvalidArgumentError("the peer sent more bytes than its transfer has");
  }
  if (partial.bytes < partial.total) return Complete{};

  text_ -= partial.notify.size();
  notify_.swap(partial.notify);
  partial.notify.clear();  // of the one before
  if (spare_.size() < kMostSpare) spare_.push_back(std::move(partial));
  open_.erase(it);
  completed_[slot].add(generation);
  return Complete{true, notify_};
}

bool Arrivals::has(TransferId transfer, uint32_t slice) const {
  const auto [slot, generation] = transfer;
  if (slot < completed_.size() && completed_[slot].holds(generation)) return true;
  const auto it = open_.find(place_of(transfer));
  return it != open_.end() && it->second.generation == generation && slice < kMaxSlices &&
         (it->second.seen[slice / 64] & (uint64_t{1} << (slice % 64))) != 0;
}

}  // namespace baton::internal
