// Which bytes a field of a layout takes.
#include "kvtransfer/plans/kv_extents.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"

namespace baton::kvtransfer {
namespace {

uint64_t extent_from(const KvSteps& steps, size_t level) {
  uint64_t extent = steps.element_bytes;
  for (size_t i = level; i < steps.steps.size(); ++i) {
    const KvStep& step = steps.steps[i];
    extent = saturating_add(extent, saturating_mul(step.count - 1, step.stride));
  }
  return extent;
}

// `distance` may be negative: the second then begins before the first.
bool shares_from(const KvSteps& a, const KvSteps& b, size_t level, int64_t distance) {
  const auto size_a = static_cast<int64_t>(extent_from(a, level));
  const auto size_b = static_cast<int64_t>(extent_from(b, level));
  if (distance >= size_a || distance <= -size_b) return false;
  const bool same = level < a.steps.size() && a.steps[level].count == b.steps[level].count &&
                    a.steps[level].stride == b.steps[level].stride;
  if (!same || a.steps[level].count == 1) return true;
  const auto stride = static_cast<int64_t>(a.steps[level].stride);
  const auto most = static_cast<int64_t>(a.steps[level].count) - 1;
  const int64_t near = distance / stride;
  for (int64_t steps = near - 1; steps <= near + 1; ++steps) {
    if (steps < -most || steps > most) continue;
    if (shares_from(a, b, level + 1, distance - steps * stride)) return true;
  }
  return false;
}

// Pairs of fields looked at, in all groups: those of 360 layers that lie interleaved, K and V
// apart.
constexpr size_t kMaxPairs = 1 << 18;

// Where one layer of a field lies: in a buffer, or in a memory in which buffers have addresses.
struct Range {
  uint64_t space;
  uint32_t buffer, field, layer;
  uint64_t begin, end;
};

std::vector<Range> ranges_of(const KvLayout& layout, const KvGroup& group,
                             absl::Span<const uint64_t> addresses) {
  std::vector<Range> ranges;
  for (uint32_t f = 0; f < group.fields.size(); ++f) {
    const uint64_t extent = extent_from(steps_of(group, group.fields[f]), 0);
    for (uint32_t layer = 0; layer < group.layers.size(); ++layer) {
      const KvPlace& place = group.fields[f].places[layer];
      const KvBuffer& buffer = layout.buffers[place.buffer];
      const bool apart = addresses.empty();
      const uint64_t space =
          apart ? place.buffer
                : (uint64_t{buffer.device_index} << 8) | static_cast<uint64_t>(buffer.device);
      const uint64_t begin = place.offset + (apart ? 0 : addresses[place.buffer]);
      ranges.push_back({space, place.buffer, f, layer, begin, begin + extent});
    }
  }
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) {
    return a.space != b.space ? a.space < b.space : a.begin < b.begin;
  });
  return ranges;
}

}  // namespace

KvSteps steps_of(const KvGroup& group, const KvField& field) {
  const uint64_t rows = field.per_block ? 1 : group.block_tokens / std::max(field.row_tokens, 1u);
  KvSteps out;
  out.element_bytes = bytes_of(field.dtype);
  out.steps = {
      KvStep{"block", group.blocks, field.block_stride}, KvStep{"token", rows, field.token_stride},
      KvStep{"head", group.heads, field.head_stride}, KvStep{"run", field.runs, field.run_stride},
      KvStep{"element", field.width, field.element_stride}};
  for (KvStep& step : out.steps) {
    if (step.count == 1) step.stride = 0;
  }
  std::stable_sort(out.steps.begin(), out.steps.end(),
                   [](const KvStep& a, const KvStep& b) { return a.stride > b.stride; });
  return out;
}

uint64_t extent_of(const KvSteps& steps) { return extent_from(steps, 0); }

bool shares_bytes(const KvSteps& first, const KvSteps& second, uint64_t distance) {
  return shares_from(first, second, 0, static_cast<int64_t>(distance));
}

absl::Status check_overlaps(const KvLayout& layout, absl::Span<const uint64_t> addresses) {
  size_t pairs = 0;
  for (const KvGroup& group : layout.groups) {
    const std::vector<Range> ranges = ranges_of(layout, group, addresses);
    std::vector<KvSteps> steps;
    for (const KvField& field : group.fields) steps.push_back(steps_of(group, field));
    for (size_t i = 0; i < ranges.size(); ++i) {
      const Range& a = ranges[i];
      for (size_t k = i + 1; k < ranges.size(); ++k) {
        const Range& b = ranges[k];
        if (b.space != a.space || b.begin >= a.end) break;
        if (++pairs > kMaxPairs) {
          return absl::InvalidArgumentError(
              "KV layout: too many layers lie interleaved in one buffer: use a buffer for each "
              "layer");
        }
        if (!shares_bytes(steps[a.field], steps[b.field], b.begin - a.begin)) continue;
        return absl::InvalidArgumentError(absl::StrCat(
            "KV layout: layer ", group.layers[a.layer], "'s ", name_of(group.fields[a.field].role),
            " and layer ", group.layers[b.layer], "'s ", name_of(group.fields[b.field].role),
            " overlap in buffer ", a.buffer,
            a.buffer == b.buffer ? "" : absl::StrCat(" and buffer ", b.buffer)));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace baton::kvtransfer
