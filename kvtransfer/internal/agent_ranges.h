// Registered ranges by address: finds the one that covers a descriptor. Ranges may overlap and
// repeat. A table is made out of another in one pass, however many come and go and in whatever
// order: one at a time, 10,000 of them would be moved 10,000 times.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "kvtransfer/agent.h"

namespace baton::kvtransfer {

template <typename Region>  // MemoryRegion, RemoteRegion or FileRegion
class AgentRanges {
 public:
  struct Range {
    Descriptor where;
    Region region;
    uint64_t reach = 0;  // the highest end of this range and all before it
  };
  static constexpr size_t kNone = std::numeric_limits<size_t>::max();

  // These and `added`, whose last one is the newest.
  AgentRanges with(std::vector<Range> added) const {
    std::stable_sort(added.begin(), added.end(), before);
    AgentRanges out;
    out.ranges_.reserve(ranges_.size() + added.size());
    std::merge(ranges_.begin(), ranges_.end(), std::move_iterator(added.begin()),
               std::move_iterator(added.end()), std::back_inserter(out.ranges_), before);
    out.measure();
    return out;
  }

  // These, but for those at `indices`, which may come in any order.
  AgentRanges without(std::vector<size_t> indices) const {
    std::sort(indices.begin(), indices.end());
    AgentRanges out;
    out.ranges_.reserve(ranges_.size());
    auto gone = indices.begin();
    for (size_t i = 0; i < ranges_.size(); ++i) {
      while (gone != indices.end() && *gone < i) ++gone;
      if (gone == indices.end() || *gone != i) out.ranges_.push_back(ranges_[i]);
    }
    out.measure();
    return out;
  }

  // The newest range that was added as `where`; not from among the first `skip` of them.
  std::optional<size_t> find(const Descriptor& where, size_t skip = 0) const {
    const auto end = std::upper_bound(ranges_.begin(), ranges_.end(), where, order_before);
    const auto place = static_cast<size_t>(end - ranges_.begin());
    if (place <= skip || ranges_[place - 1 - skip].where != where) return std::nullopt;
    return place - 1 - skip;
  }

  // For each of `list`, the newest equal range; for repeated ones, the next older;
  // kNone where there is none.
  std::vector<size_t> find_all(absl::Span<const Descriptor> list) const {
    std::vector<size_t> order(list.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return key(list[a]) < key(list[b]); });
    std::vector<size_t> out(list.size(), kNone);
    size_t skip = 0;
    for (size_t i = 0; i < order.size(); ++i) {
      const Descriptor& where = list[order[i]];
      skip = i > 0 && list[order[i - 1]] == where ? skip + 1 : 0;
      out[order[i]] = find(where, skip).value_or(kNone);
    }
    return out;
  }

  // A range that covers [address, address + bytes); null if none does. `hint`: the range that the
  // last call found, looked at first.
  const Range* cover(uint64_t address, uint64_t bytes, uint64_t device, const Range* hint) const {
    if (hint != nullptr && covers(*hint, address, bytes, device)) return hint;
    auto at = std::upper_bound(
        ranges_.begin(), ranges_.end(), address,
        [](uint64_t wanted, const Range& range) { return wanted < range.where.address; });
    while (at != ranges_.begin() && (--at)->reach >= address) {
      if (covers(*at, address, bytes, device)) return &*at;
    }
    return nullptr;
  }

  // The order in which they stand here.
  static bool before(const Range& a, const Range& b) { return key(a.where) < key(b.where); }

  size_t size() const { return ranges_.size(); }
  const Range& operator[](size_t index) const { return ranges_[index]; }
  auto begin() const { return ranges_.begin(); }
  auto end() const { return ranges_.end(); }

 private:
  static auto key(const Descriptor& d) { return std::tie(d.address, d.bytes, d.device); }
  static bool order_before(const Descriptor& where, const Range& range) {
    return key(where) < key(range.where);
  }
  static bool covers(const Range& range, uint64_t address, uint64_t bytes, uint64_t device) {
    const uint64_t into = address - range.where.address;
    return address >= range.where.address && into <= range.where.bytes &&
           bytes <= range.where.bytes - into && device == range.where.device;
  }
  void measure() {
    uint64_t reach = 0;
    for (Range& range : ranges_) {
      reach = std::max(reach, range.where.address + range.where.bytes);
      range.reach = reach;
    }
  }

  std::vector<Range> ranges_;  // by address, bytes and device; of equal ones the newest last
};

// The ranges of an agent's memory, each kind by itself: what is registered as one kind is not found
// as another. Tables are replaced and never changed, so that whoever has one needs no lock.
template <typename Region>
class AgentMemoryTables {
 public:
  using Table = std::shared_ptr<const AgentRanges<Region>>;

  const Table& of(MemoryKind kind) const { return kind == MemoryKind::kVram ? vram_ : dram_; }
  void replace(MemoryKind kind, AgentRanges<Region> by) {
    (kind == MemoryKind::kVram ? vram_ : dram_) =
        std::make_shared<const AgentRanges<Region>>(std::move(by));
  }
  size_t size() const { return dram_->size() + vram_->size(); }

 private:
  Table dram_ = std::make_shared<const AgentRanges<Region>>();
  Table vram_ = dram_;
};

}  // namespace baton::kvtransfer
