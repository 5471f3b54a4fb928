// The layouts that engines really have, from the counts that engines have at hand.
#include <numeric>
#include <utility>

#include "kvtransfer/kv_layout.h"
#include "kvtransfer/plans/kv_numbers.h"

namespace baton::kvtransfer {
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
