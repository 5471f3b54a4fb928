// Descriptors into segments: neighbours with one step and one size share a segment.
#include "kvtransfer/internal/agent_list.h"

#include <algorithm>
#include <limits>
#include <new>
#include <numeric>
#include <type_traits>

#include "absl/strings/str_format.h"
#include "kvtransfer/internal/agent_memory_kind.h"

namespace baton::kvtransfer {
namespace {

constexpr uint64_t kMaxList = std::numeric_limits<uint32_t>::max();

constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();

uint64_t distance(uint64_t a, uint64_t b) { return a < b ? b - a : a - b; }

}  // namespace

template <typename Region>
class AgentListMaker {
 public:
  using Range = typename AgentRanges<Region>::Range;

  AgentListMaker(const AgentRanges<Region>& ranges, const std::string& whose, MemoryKind kind)
      : ranges_(ranges), whose_(whose), use_of_(ranges.size(), kNone) {
    list_.kind = kind;
  }

  absl::Status add(const Descriptor& d) {
    const Range* range = ranges_.cover(d.address, d.bytes, d.device, range_);
    if (range == nullptr) return not_found(d.address, d.bytes, d.device);
    if (range != range_) enter(range);
    const uint64_t offset = d.address - range->where.address;
    AgentSegment* last = list_.segments_.empty() ? nullptr : &list_.segments_.back();
    const uint64_t held = last == nullptr ? 0 : list_.size_ - last->first;
    const bool fits = last != nullptr && last->use == use_ && last->bytes == d.bytes &&
                      (held == 1 || last->offset + held * last->step == offset);
    if (!fits) {
      list_.segments_.push_back({offset, 0, d.bytes, use_, static_cast<uint32_t>(list_.size_)});
    } else if (held == 1) {
      last->step = offset - last->offset;
    }
    touch(offset);
    ++list_.size_;
    return absl::OkStatus();
  }

  absl::Status add(const StridedDescriptor& row) {
    if (row.count == 0 || row.count > kMaxList - list_.size_) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "row %u stands for %u descriptors: a list has 1 to %u", rows_, row.count, kMaxList));
    }
    if (row.count > 1 && row.stride < row.bytes) {
      return absl::NotFoundError(
          absl::StrFormat("row %u has a stride of %u bytes, less than the %u of each descriptor",
                          rows_, row.stride, row.bytes));
    }
    const std::optional<Descriptor> span = row.span();
    if (!span) return not_found(row.address, std::numeric_limits<uint64_t>::max(), row.device);
    const Range* range = ranges_.cover(span->address, span->bytes, span->device, range_);
    if (range == nullptr) return not_found(span->address, span->bytes, span->device);
    if (range != range_) enter(range);
    const uint64_t offset = row.address - range->where.address;
    list_.segments_.push_back({offset, row.count > 1 ? row.stride : 0, row.bytes, use_,
                               static_cast<uint32_t>(list_.size_)});
    touch(offset);
    if (row.count > 1) touch(offset + row.stride * (row.count - 1), row.stride);
    list_.size_ += row.count;
    ++rows_;
    return absl::OkStatus();
  }

  absl::StatusOr<AgentList> finish() {
    if (list_.size_ == 0) return absl::InvalidArgumentError("an empty list of descriptors");
    list_.per_segment_ = list_.size_;
    if (list_.segments_.size() > 1) list_.per_segment_ = list_.segments_[1].first;
    for (size_t i = 2; i < list_.segments_.size(); ++i) {
      if (list_.segments_[i].first != i * list_.per_segment_) list_.per_segment_ = 0;
      if (list_.per_segment_ == 0) break;
    }
    // The last may be shorter, not longer.
    if (list_.size_ > list_.segments_.size() * list_.per_segment_) list_.per_segment_ = 0;
    if (list_.per_segment_ == 0) {
      list_.segment_of_.resize(list_.size_);
      for (size_t i = 0; i < list_.segments_.size(); ++i) {
        const bool last = i + 1 == list_.segments_.size();
        const uint64_t end = last ? list_.size_ : list_.segments_[i + 1].first;
        std::fill(list_.segment_of_.begin() + list_.segments_[i].first,
                  list_.segment_of_.begin() + static_cast<ptrdiff_t>(end),
                  static_cast<uint32_t>(i));
      }
    }
    list_.segments_.shrink_to_fit();
    return std::move(list_);
  }

 private:
  // From now on descriptors lie in `range`.
  void enter(const Range* range) {
    range_ = range;
    uint32_t& known = use_of_[static_cast<size_t>(range - &ranges_[0])];
    if (known != kNone) {
      use_ = known;
      return;
    }
    use_ = known = static_cast<uint32_t>(list_.uses_.size());
    AgentUse& use = list_.uses_.emplace_back();
    if constexpr (std::is_same_v<Region, MemoryRegion>) {
      use.local = range->region;
    } else if constexpr (std::is_same_v<Region, FileRegion>) {
      use.file = range->region;
    } else {
      use.remote = range->region;
    }
    use.lowest = std::numeric_limits<uint64_t>::max();
  }

  void touch(uint64_t offset, uint64_t step = 0) {
    AgentUse& use = list_.uses_[use_];
    if (use.lowest != std::numeric_limits<uint64_t>::max()) {
      const uint64_t away = distance(offset, use.lowest);
      if (use.unit == 0 || away % use.unit != 0) use.unit = std::gcd(use.unit, away);
      if (step != 0) use.unit = std::gcd(use.unit, step);
    }
    use.lowest = std::min(use.lowest, offset);
  }

  absl::Status not_found(uint64_t address, uint64_t bytes, uint64_t device) const {
    return absl::NotFoundError(absl::StrFormat(
        "descriptor %u (%u bytes at %#x, device %u) is not within one registered %s range of %s: "
        "register the memory first, and load the metadata again if it is another agent's",
        list_.size_, bytes, address, device, kind_name(list_.kind), whose_));
  }

  const AgentRanges<Region>& ranges_;
  const std::string& whose_;
  AgentList list_;
  std::vector<uint32_t> use_of_;  // by range
  const Range* range_ = nullptr;
  uint32_t use_ = 0;
  uint64_t rows_ = 0;
};

template <typename Region, typename Row>
absl::StatusOr<AgentList> make_agent_list(const AgentRanges<Region>& ranges,
                                          absl::Span<const Row> rows, const std::string& whose,
                                          MemoryKind kind) {
  if (rows.size() > kMaxList) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%u descriptors are too many: a list has up to %u", rows.size(), kMaxList));
  }
  try {
    AgentListMaker<Region> maker(ranges, whose, kind);
    for (const Row& row : rows) {
      if (absl::Status status = maker.add(row); !status.ok()) return status;
    }
    return maker.finish();
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("no memory for a list of %u descriptors", rows.size()));
  }
}

#define BATON_MAKES_LISTS(Region, Row)                \
  template absl::StatusOr<AgentList> make_agent_list( \
      const AgentRanges<Region>&, absl::Span<const Row>, const std::string&, MemoryKind)
BATON_MAKES_LISTS(MemoryRegion, Descriptor);
BATON_MAKES_LISTS(MemoryRegion, StridedDescriptor);
BATON_MAKES_LISTS(RemoteRegion, Descriptor);
BATON_MAKES_LISTS(RemoteRegion, StridedDescriptor);
BATON_MAKES_LISTS(FileRegion, Descriptor);
BATON_MAKES_LISTS(FileRegion, StridedDescriptor);
#undef BATON_MAKES_LISTS

}  // namespace baton::kvtransfer
