// Registered ranges by address: finds the one that covers a descriptor. Ranges may overlap and
// repeat.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "kvtransfer/agent.h"

namespace baton::kvtransfer {

template <typename Region>  // MemoryRegion or RemoteRegion: comparable by generation and index
class AgentRanges {
 public:
  struct Range {
    Descriptor where;
    Region region;
    uint64_t reach = 0;  // the highest end of this range and all before it
  };

  void add(const Descriptor& where, const Region& region) {
    const auto at = std::upper_bound(ranges_.begin(), ranges_.end(), where.address, before);
    const auto place = at - ranges_.begin();
    ranges_.insert(at, {where, region, 0});
    update(static_cast<size_t>(place));
  }

  // The newest range that was added as `where`; not from among the first `skip` of them.
  std::optional<size_t> find(const Descriptor& where, size_t skip = 0) const {
    auto at = std::upper_bound(ranges_.begin(), ranges_.end(), where.address, before);
    while (at != ranges_.begin() && (--at)->where.address == where.address) {
      if (at->where == where && skip-- == 0) return static_cast<size_t>(at - ranges_.begin());
    }
    return std::nullopt;
  }

  void remove(size_t index) {
    ranges_.erase(ranges_.begin() + static_cast<ptrdiff_t>(index));
    update(index);
  }

  // A range that covers [address, address + bytes); null if none does. `hint`: the range that the
  // last call found, looked at first.
  const Range* cover(uint64_t address, uint64_t bytes, uint64_t device, const Range* hint) const {
    if (hint != nullptr && covers(*hint, address, bytes, device)) return hint;
    auto at = std::upper_bound(ranges_.begin(), ranges_.end(), address, before);
    while (at != ranges_.begin() && (--at)->reach >= address) {
      if (covers(*at, address, bytes, device)) return &*at;
    }
    return nullptr;
  }

  size_t size() const { return ranges_.size(); }
  const Range& operator[](size_t index) const { return ranges_[index]; }
  auto begin() const { return ranges_.begin(); }
  auto end() const { return ranges_.end(); }

 private:
  static bool before(uint64_t address, const Range& range) { return address < range.where.address; }
  static bool covers(const Range& range, uint64_t address, uint64_t bytes, uint64_t device) {
    const uint64_t into = address - range.where.address;
    return address >= range.where.address && into <= range.where.bytes &&
           bytes <= range.where.bytes - into && device == range.where.device;
  }
  void update(size_t from) {
    uint64_t reach = from == 0 ? 0 : ranges_[from - 1].reach;
    for (size_t i = from; i < ranges_.size(); ++i) {
      reach = std::max(reach, ranges_[i].where.address + ranges_[i].where.bytes);
      ranges_[i].reach = reach;
    }
  }

  std::vector<Range> ranges_;  // by address
};

}  // namespace baton::kvtransfer
