// KV layouts on the wire. Layer numbers and places are written as runs: a cache with a tensor for
// each layer takes as many bytes as one in a single tensor.
//
//   version(1) buffers(2) {runs of: count(2) bytes(8) device(1) index(4)}
//   groups(1) { layers as runs: runs(2) {count(2) first(4) step(4)}
//               blocks(4) block_tokens(4) window(4) total_heads(4) first_head(4) heads(4)
//               fields(1) { role(1) dtype(1) per_block(1) width(4) strides(4 x 8)
//                           places as runs: runs(2) {count(2) buffer(4) step(4) offset(8) step(8)}
//                           of version 3: row_tokens(4) runs(4) run_stride(8) order(length(2),
//                           bytes) } }
//   format model.weights model.dtype model.rope (length(2), bytes)
#include <algorithm>

#include "kvtransfer/kv_layout.h"
#include "transport/base/fields.h"

namespace baton::kvtransfer {
namespace {

constexpr uint8_t kVersion = 2;
constexpr uint8_t kPackedVersion = 3;  // written where a field is packed: older releases have none

bool has_packed(const KvLayout& layout) {
  return std::any_of(layout.groups.begin(), layout.groups.end(), [](const KvGroup& group) {
    return std::any_of(group.fields.begin(), group.fields.end(),
                       [](const KvField& field) { return field.is_packed(); });
  });
}

// Runs of what a list holds: entry i of one is at(i). The longest that begins with `first`, and
// goes on as it goes from `first` to `next`, is made by between(first, next).
struct BufferRun {
  using Entry = KvBuffer;
  uint16_t count = 0;
  KvBuffer buffer;
  static BufferRun between(const KvBuffer& first, const KvBuffer&) { return {1, first}; }
  KvBuffer at(uint32_t) const { return buffer; }
  static void fields(auto& wire, auto& m) {
    auto device = static_cast<uint8_t>(m.buffer.device);
    wire(m.count, m.buffer.bytes, device, m.buffer.device_index);
    if constexpr (requires { m.count = 0; }) m.buffer.device = static_cast<KvDevice>(device);
  }
};

struct LayerRun {
  using Entry = uint32_t;
  uint16_t count = 0;
  uint32_t first = 0, step = 0;
  static LayerRun between(uint32_t first, uint32_t next) { return {1, first, next - first}; }
  uint32_t at(uint32_t i) const { return first + i * step; }
  static void fields(auto& wire, auto& m) { wire(m.count, m.first, m.step); }
};

struct PlaceRun {
  using Entry = KvPlace;
  uint16_t count = 0;
  uint32_t buffer = 0, buffer_step = 0;
  uint64_t offset = 0, offset_step = 0;
  static PlaceRun between(const KvPlace& first, const KvPlace& next) {
    return {1, first.buffer, next.buffer - first.buffer, first.offset, next.offset - first.offset};
  }
  KvPlace at(uint32_t i) const { return {buffer + i * buffer_step, offset + i * offset_step}; }
  static void fields(auto& wire, auto& m) {
    wire(m.count, m.buffer, m.buffer_step, m.offset, m.offset_step);
  }
};

// A list as its longest runs: a reader appends to it, at most `limit` entries.
template <typename Run>
void runs(auto& wire, auto& list, size_t limit) {
  std::vector<Run> all;
  for (size_t begin = 0; begin < list.size(); begin += all.back().count) {
    const size_t next = std::min(begin + 1, list.size() - 1);
    Run& run = all.emplace_back(Run::between(list[begin], list[next]));
    while (begin + run.count < list.size() && run.count < UINT16_MAX &&
           list[begin + run.count] == run.at(run.count)) {
      ++run.count;
    }
  }
  wire.brief(all, UINT16_MAX);
  if constexpr (requires { list.clear(); }) {
    list.clear();
    for (const Run& run : all) {
      wire.require(list.size() + run.count <= limit);
      if (list.size() + run.count > limit) return;
      for (uint32_t i = 0; i < run.count; ++i) list.push_back(run.at(i));
    }
  }
}

// A list's length in a byte; a reader makes it so long.
void byte_count(auto& wire, auto& list, size_t limit) {
  auto count = static_cast<uint8_t>(list.size());
  wire(count);
  wire.require(count <= limit);
  if constexpr (requires { list.resize(1); }) list.resize(count <= limit ? count : 0);
}

void field_fields(auto& wire, auto& m, size_t layers, bool packed) {
  auto role = static_cast<uint8_t>(m.role);
  auto dtype = static_cast<uint8_t>(m.dtype);
  wire(role, dtype, m.per_block, m.width, m.block_stride, m.token_stride, m.head_stride,
       m.element_stride);
  if constexpr (requires { m.places.clear(); }) {
    m.role = static_cast<KvRole>(role);
    m.dtype = static_cast<KvDtype>(dtype);
  }
  runs<PlaceRun>(wire, m.places, layers);
  if (!packed) return;
  wire(m.row_tokens, m.runs, m.run_stride);
  wire.brief(m.order, KvLayout::kMaxOrder);
}

void layout_fields(auto& wire, auto& m) {
  uint8_t version = has_packed(m) ? kPackedVersion : kVersion;
  wire(version);
  wire.require(version == kVersion || version == kPackedVersion);
  runs<BufferRun>(wire, m.buffers, KvLayout::kMaxBuffers);
  byte_count(wire, m.groups, KvLayout::kMaxGroups);
  size_t layers_left = KvLayout::kMaxLayers;
  for (auto& group : m.groups) {
    runs<LayerRun>(wire, group.layers, layers_left);
    layers_left -= group.layers.size();
    wire(group.blocks, group.block_tokens, group.window, group.total_heads, group.first_head,
         group.heads);
    byte_count(wire, group.fields, KvLayout::kMaxFields);
    for (auto& field : group.fields) {
      field_fields(wire, field, group.layers.size(), version == kPackedVersion);
    }
  }
  wire.brief(m.format, KvLayout::kMaxFormat);
  wire.brief(m.model.weights, KvLayout::kMaxModel);
  wire.brief(m.model.dtype, KvLayout::kMaxModel);
  wire.brief(m.model.rope, KvLayout::kMaxModel);
  wire.require(has_packed(m) == (version == kPackedVersion));  // one layout has one form
}

}  // namespace

std::string KvLayout::encode() const {
  std::string out;
  base::FieldWriter wire(out);
  layout_fields(wire, *this);
  return out;
}

absl::StatusOr<KvLayout> KvLayout::decode(std::string_view bytes) {
  base::FieldReader wire(bytes);
  KvLayout layout;
  layout_fields(wire, layout);
  if (!wire.finished()) {
    return absl::InvalidArgumentError("KV layout: truncated, overlong or of another release");
  }
  if (absl::Status status = layout.check(); !status.ok()) return status;
  return layout;
}

}  // namespace baton::kvtransfer
