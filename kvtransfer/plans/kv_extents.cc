// Which bytes a field of a layout takes.
#include "kvtransfer/plans/kv_extents.h"

#include <algorithm>

#include "kvtransfer/plans/kv_numbers.h"

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

}  // namespace

KvSteps steps_of(const KvGroup& group, const KvField& field) {
  const uint64_t tokens = field.per_block ? 1 : group.block_tokens;
  KvSteps out;
  out.element_bytes = bytes_of(field.dtype);
  out.steps = {KvStep{"block", group.blocks, field.block_stride},
               KvStep{"token", tokens, field.token_stride},
               KvStep{"head", group.heads, field.head_stride},
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

}  // namespace baton::kvtransfer
