// The initiator's cache of its peer's rkeys. A RemoteRegion holds Baton's own key; the rkey that an
// adapter needs is requested on first use, and the owner sends it only to a peer that shows the
// right key.
//
// A name (index, generation and key) always means the same registration, so an answer, also a
// refusal, stays true until the owner reports that the region is gone.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "verbs/device/message.h"

namespace baton::verbs {

struct KnownRegion {
  enum class State { kAsked, kKnown, kRefused };
  State state = State::kAsked;
  uint64_t base = 0;
  uint64_t size = 0;
  Access access = Access::kLocal;
  std::vector<uint32_t> rkeys;
  absl::Status refusal;
};

class KnownRegions {
 public:
  static constexpr size_t kCapacity = 2 * RegionTable::kCapacity;

  // The cached answer; null if it must be requested, and then it counts as requested.
  const KnownRegion* find_or_ask(const RegionName& name) {
    if (last_ != nullptr && last_->first == name) return &last_->second;
    if (const auto it = regions_.find(name); it != regions_.end()) {
      last_ = &*it;
      return &it->second;
    }
    last_ = nullptr;
    if (regions_.size() >= kCapacity) {
      absl::erase_if(regions_, [](const auto& entry) {
        return entry.second.state != KnownRegion::State::kAsked;
      });
    }
    regions_.emplace(name, KnownRegion());
    return nullptr;
  }
  // Looks only at the region that was found last; null if this is another one, or not known yet.
  const KnownRegion* known(const RegionName& name) const {
    if (last_ == nullptr || last_->first != name) return nullptr;
    return last_->second.state == KnownRegion::State::kKnown ? &last_->second : nullptr;
  }
  void learn(RegionAnswer answer) {
    const auto it = regions_.find(answer.name);
    if (it == regions_.end()) return;  // forgotten since
    KnownRegion& region = it->second;
    region.state = answer.refusal.ok() ? KnownRegion::State::kKnown : KnownRegion::State::kRefused;
    region.base = answer.base;
    region.size = answer.size;
    region.access = answer.access;
    region.rkeys = std::move(answer.rkeys);
    region.refusal = std::move(answer.refusal);
  }
  void forget(const RegionName& name) {
    last_ = nullptr;
    regions_.erase(name);
  }
  // Questions may have been lost with a rail: they will be asked again.
  void forget_asked() {
    last_ = nullptr;
    absl::erase_if(regions_, [](const auto& entry) {
      return entry.second.state == KnownRegion::State::kAsked;
    });
  }

 private:
  using Map = absl::flat_hash_map<RegionName, KnownRegion>;
  Map regions_;
  const Map::value_type* last_ = nullptr;  // found: a KV pool is one region
};

}  // namespace baton::verbs
