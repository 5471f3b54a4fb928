// KV layouts: their sizes, and the checks that everything else relies on.
#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvtransfer/kv_layout.h"
#include "kvtransfer/plans/kv_extents.h"
#include "transport/base/nearest_name.h"

namespace baton::kvtransfer {
namespace {

// Every offset then fits in an int64_t, with room for where a buffer begins in its region.
constexpr uint64_t kMaxBytes = uint64_t{1} << 60;
template <typename... Parts>
absl::Status invalid(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat("KV layout: ", parts...));
}

absl::Status check_counts(const KvGroup& group, size_t number) {
  if (group.layers.empty() || group.blocks == 0 || group.block_tokens == 0 || group.heads == 0 ||
      group.fields.empty()) {
    return invalid("group ", number,
                   " must have at least one each of layers, blocks, tokens in a block, heads and "
                   "fields, not ",
                   group.layers.size(), ", ", group.blocks, ", ", group.block_tokens, ", ",
                   group.heads, ", ", group.fields.size());
  }
  if (group.fields.size() > KvLayout::kMaxFields) {
    return invalid(group.fields.size(), " fields; at most ", KvLayout::kMaxFields, " are possible");
  }
  if (group.heads > group.total_heads || group.first_head > group.total_heads - group.heads) {
    return invalid("heads [", group.first_head, ", ", uint64_t{group.first_head} + group.heads,
                   ") are not among the model's ", group.total_heads);
  }
  return absl::OkStatus();
}

// What a row of a field is.
absl::Status check_row(const KvGroup& group, const KvField& field) {
  const absl::string_view role = name_of(field.role);
  if (field.order.size() > KvLayout::kMaxOrder) {
    return invalid("the order of a row of the ", role, " is described in ", field.order.size(),
                   " bytes; at most ", KvLayout::kMaxOrder);
  }
  if (field.row_tokens == 0 || group.block_tokens % field.row_tokens != 0 ||
      (field.per_block && field.row_tokens != 1)) {
    return invalid("a row of ", field.row_tokens, " tokens of the ", role, " in a block of ",
                   group.block_tokens);
  }
  const uint64_t elements = uint64_t{field.width} * field.runs;
  if (elements == 0 || elements > UINT32_MAX / 8 || elements % field.row_tokens != 0) {
    return invalid("a row of ", field.row_tokens, " tokens of the ", role, " in ", field.runs,
                   " runs of ", field.width, " elements");
  }
  if (field.runs > 1 && field.width > 1 && field.element_stride != bytes_of(field.dtype)) {
    return invalid("a run of the ", role, " has gaps");
  }
  return absl::OkStatus();
}

// One field by itself.
absl::Status check_field(const KvLayout& layout, const KvGroup& group, const KvField& field) {
  const absl::string_view role = name_of(field.role);
  if (role.empty()) return invalid("a field of unknown role ", static_cast<int>(field.role));
  if (name_of(field.dtype).empty()) {
    return invalid("a field of unknown type ", static_cast<int>(field.dtype));
  }
  if (field.width == 0 || field.width > UINT32_MAX / 8) {
    return invalid("a ", role, " of ", field.width, " elements");
  }
  if (absl::Status status = check_row(group, field); !status.ok()) return status;
  if (field.places.size() != group.layers.size()) {
    return invalid(field.places.size(), " places of the ", role, " for ", group.layers.size(),
                   " layers");
  }
  const KvSteps steps = steps_of(group, field);
  uint64_t extent = steps.element_bytes;
  for (size_t i = steps.steps.size(); i-- > 0;) {
    const KvStep& step = steps.steps[i];
    if (step.count == 1) continue;
    if (step.stride < extent) {
      return invalid("the ", role, "'s ", step.name, " stride of ", step.stride,
                     " bytes is less than the ", extent, " bytes that lie between two of them");
    }
    extent = saturating_add(extent, saturating_mul(step.count - 1, step.stride));
  }
  if (extent > kMaxBytes) return invalid("the ", role, " would take more than 2^60 bytes");
  for (size_t i = 0; i < field.places.size(); ++i) {
    const KvPlace& place = field.places[i];
    if (place.buffer >= layout.buffers.size()) {
      return invalid("layer ", group.layers[i], "'s ", role, " is in buffer ", place.buffer, " of ",
                     layout.buffers.size());
    }
    const uint64_t bytes = layout.buffers[place.buffer].bytes;
    if (place.offset > bytes || extent > bytes - place.offset) {
      return invalid("layer ", group.layers[i], "'s ", role, " ends ",
                     saturating_add(place.offset, extent), " bytes into buffer ", place.buffer,
                     ", which has ", bytes);
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::string_view name_of(KvRole role) {
  constexpr const char* kNames[] = {"",           "opaque head", "K",
                                    "V",          "latent",      "rotated part of K",
                                    "scale of K", "scale of V",  "scale of the latent"};
  static_assert(std::size(kNames) == static_cast<size_t>(kLastKvRole) + 1);
  return base::name_at(kNames, role, "");
}

absl::string_view name_of(KvDtype dtype) {
  constexpr const char* kNames[] = {"",         "bytes", "int8", "fp8 e4m3",
                                    "fp8 e5m2", "fp16",  "bf16", "fp32"};
  static_assert(std::size(kNames) == static_cast<size_t>(kLastKvDtype) + 1);
  return base::name_at(kNames, dtype, "");
}

uint32_t KvLayout::layers() const {
  size_t count = 0;
  for (const KvGroup& group : groups) count += group.layers.size();
  return static_cast<uint32_t>(count);
}

uint64_t KvLayout::bytes() const {
  uint64_t sum = 0;
  for (const KvBuffer& buffer : buffers) sum = saturating_add(sum, buffer.bytes);
  return sum;
}

void KvLayout::fit_buffers() {
  for (KvBuffer& buffer : buffers) buffer.bytes = 0;
  for (const KvGroup& group : groups) {
    for (const KvField& field : group.fields) {
      const uint64_t extent = extent_of(steps_of(group, field));
      for (const KvPlace& place : field.places) {
        if (place.buffer >= buffers.size()) buffers.resize(place.buffer + 1);
        uint64_t& bytes = buffers[place.buffer].bytes;
        bytes = std::max(bytes, saturating_add(place.offset, extent));
      }
    }
  }
}

absl::Status KvLayout::check() const {
  if (buffers.empty() || buffers.size() > kMaxBuffers) {
    return invalid(buffers.size(), " buffers; 1 to ", kMaxBuffers, " are possible");
  }
  if (groups.empty() || groups.size() > kMaxGroups) {
    return invalid(groups.size(), " groups of layers; 1 to ", kMaxGroups, " are possible");
  }
  if (format.size() > kMaxFormat) {
    return invalid("the format's name has ", format.size(), " bytes; at most ", kMaxFormat);
  }
  for (const std::string* text : {&model.weights, &model.dtype, &model.rope}) {
    if (text->size() <= kMaxModel) continue;
    return invalid("a text about the model has ", text->size(), " bytes; at most ", kMaxModel);
  }
  for (const KvBuffer& buffer : buffers) {
    if (buffer.device > KvDevice::kCuda) {
      return invalid("a buffer on unknown device ", static_cast<int>(buffer.device));
    }
  }
  // Before sizes, which counts of zero make nonsense of.
  for (size_t g = 0; g < groups.size(); ++g) {
    if (absl::Status status = check_counts(groups[g], g); !status.ok()) return status;
  }
  if (bytes() > kMaxBytes) return invalid("the cache would be larger than 2^60 bytes");
  std::vector<bool> named(kMaxLayers, false);
  for (size_t g = 0; g < groups.size(); ++g) {
    const KvGroup& group = groups[g];
    for (size_t i = 0; i < group.layers.size(); ++i) {
      const uint32_t layer = group.layers[i];
      if (layer >= kMaxLayers) {
        return invalid("layer ", layer, "; at most ", kMaxLayers, " are possible");
      }
      if (i > 0 && layer <= group.layers[i - 1]) {
        return invalid("the layers of group ", g, " are not in ascending order");
      }
      if (named[layer]) return invalid("layer ", layer, " is in two groups");
      named[layer] = true;
    }
    uint32_t roles = 0;
    for (const KvField& field : group.fields) {
      if (absl::Status status = check_field(*this, group, field); !status.ok()) return status;
      const uint32_t bit = 1u << static_cast<uint32_t>(field.role);
      if ((roles & bit) != 0) return invalid("two fields are the ", name_of(field.role));
      roles |= bit;
    }
  }
  return check_overlaps(*this, {});
}

// The layouts that engines really have, from the counts that engines have at hand.

namespace {

KvGroup group_of(const KvShape& shape) {
  KvGroup group;
  // Counts beyond reason are cut: check() refuses what is left just as well.
  group.layers.resize(std::min(shape.layers, KvLayout::kMaxLayers + 1));
  std::iota(group.layers.begin(), group.layers.end(), 0u);
  group.blocks = shape.blocks;
  group.block_tokens = shape.block_tokens;
  group.total_heads = shape.total_heads;
  group.first_head = shape.first_head;
  group.heads = shape.heads;
  return group;
}

// Layer i of the field begins at offset + i * stride of buffer + i * step.
void place(KvField& field, size_t layers, uint32_t buffer, uint32_t step, uint64_t offset,
           uint64_t stride) {
  for (uint64_t i = 0; i < layers; ++i) {
    field.places.push_back({buffer + static_cast<uint32_t>(i) * step,
                            saturating_add(offset, saturating_mul(i, stride))});
  }
}

KvLayout finished(KvGroup group) {
  KvLayout layout;
  layout.groups.push_back(std::move(group));
  layout.fit_buffers();
  return layout;
}

}  // namespace

KvLayout KvLayout::dense(uint32_t layers, uint32_t blocks, uint32_t block_tokens, uint32_t heads,
                         uint32_t head_bytes, std::string format) {
  KvGroup group = group_of({.layers = layers,
                            .blocks = blocks,
                            .block_tokens = block_tokens,
                            .total_heads = heads,
                            .heads = heads});
  KvField field;
  field.width = head_bytes;
  field.per_block = true;
  field.element_stride = 1;
  field.token_stride = field.head_stride = head_bytes;
  field.block_stride = saturating_mul(heads, head_bytes);
  place(field, group.layers.size(), 0, 0, 0, saturating_mul(blocks, field.block_stride));
  group.fields.push_back(std::move(field));
  KvLayout layout = finished(std::move(group));
  layout.format = std::move(format);
  return layout;
}

KvLayout KvLayout::paged(const KvShape& shape, Order order, Pair pair, bool tensor_per_layer) {
  KvGroup group = group_of(shape);
  const uint64_t row = uint64_t{shape.head_size} * bytes_of(shape.dtype);
  const uint64_t rows = pair == Pair::kJoined ? 2 * row : row;  // between two rows of K
  KvField key;
  key.role = KvRole::kKey;
  key.dtype = shape.dtype;
  key.width = shape.head_size;
  key.element_stride = bytes_of(shape.dtype);
  key.token_stride = order == Order::kNhd ? saturating_mul(shape.heads, rows) : rows;
  key.head_stride = order == Order::kNhd ? rows : saturating_mul(shape.block_tokens, rows);
  const uint64_t block = saturating_mul(saturating_mul(shape.heads, shape.block_tokens), rows);
  key.block_stride = pair == Pair::kInBlock ? saturating_mul(2, block) : block;
  KvField value = key;
  value.role = KvRole::kValue;
  const uint64_t tensor = saturating_mul(shape.blocks, key.block_stride);
  const bool split = pair == Pair::kSplit;
  const uint64_t to_value = pair == Pair::kStacked   ? tensor
                            : pair == Pair::kInBlock ? block
                            : pair == Pair::kJoined  ? row
                                                     : 0;
  const uint64_t layer = pair == Pair::kStacked ? saturating_mul(2, tensor) : tensor;
  const uint32_t step = !tensor_per_layer ? 0 : split ? 2 : 1;
  const size_t layers = group.layers.size();
  place(key, layers, 0, step, 0, tensor_per_layer ? 0 : layer);
  place(value, layers, split ? 1 : 0, step, to_value, tensor_per_layer ? 0 : layer);
  group.fields = {std::move(key), std::move(value)};
  return finished(std::move(group));
}

KvLayout KvLayout::transposed_keys(const KvShape& shape) {
  KvGroup group = group_of(shape);
  const uint64_t element = bytes_of(shape.dtype);
  const uint64_t half = saturating_mul(shape.block_tokens, shape.head_size * element);
  KvField key;
  key.role = KvRole::kKey;
  key.dtype = shape.dtype;
  key.width = shape.head_size;
  key.head_stride = saturating_mul(2, half);
  key.block_stride = saturating_mul(shape.heads, key.head_stride);
  key.token_stride = element;
  key.element_stride = shape.block_tokens * element;
  KvField value = key;
  value.role = KvRole::kValue;
  value.token_stride = shape.head_size * element;
  value.element_stride = element;
  const uint64_t layer = saturating_mul(shape.blocks, key.block_stride);
  place(key, group.layers.size(), 0, 0, 0, layer);
  place(value, group.layers.size(), 0, 0, half, layer);
  group.fields = {std::move(key), std::move(value)};
  return finished(std::move(group));
}

KvLayout KvLayout::latent(uint32_t layers, uint32_t blocks, uint32_t block_tokens, uint32_t width,
                          KvDtype dtype) {
  KvGroup group = group_of({.layers = layers,
                            .blocks = blocks,
                            .block_tokens = block_tokens,
                            .total_heads = 1,
                            .heads = 1});
  KvField field;
  field.role = KvRole::kLatent;
  field.dtype = dtype;
  field.width = width;
  field.element_stride = bytes_of(dtype);
  field.token_stride = field.head_stride = uint64_t{width} * bytes_of(dtype);
  field.block_stride = block_tokens * field.token_stride;
  place(field, group.layers.size(), 0, 1, 0, 0);
  group.fields.push_back(std::move(field));
  return finished(std::move(group));
}

}  // namespace baton::kvtransfer
