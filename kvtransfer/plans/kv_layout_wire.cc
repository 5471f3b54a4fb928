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
#include "transport/base/wire.h"

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

// Calls put(begin, count) for the longest runs. same(begin, i): entry i continues the run that
// starts at `begin`, asked from the entry behind the first `free` on.
template <typename Same, typename Put>
void put_runs(std::string& out, size_t count, size_t free, const Same& same, const Put& put) {
  const size_t at = out.size();
  base::put_number(out, uint16_t{0});
  uint16_t runs = 0;
  for (size_t begin = 0; begin < count; ++runs) {
    size_t end = std::min(begin + free, count);
    while (end < count && same(begin, end)) ++end;
    base::put_number(out, static_cast<uint16_t>(end - begin));
    put(begin, end - begin);
    begin = end;
  }
  out[at] = static_cast<char>(runs & 0xff);
  out[at + 1] = static_cast<char>(runs >> 8);
}

void put_layers(std::string& out, const std::vector<uint32_t>& layers) {
  put_runs(
      out, layers.size(), 2,
      [&](size_t begin, size_t i) {
        return layers[i] - layers[i - 1] == layers[begin + 1] - layers[begin];
      },
      [&](size_t begin, size_t count) {
        base::put_number(out, layers[begin]);
        base::put_number(out, count > 1 ? layers[begin + 1] - layers[begin] : 0);
      });
}

void put_places(std::string& out, const std::vector<KvPlace>& places) {
  put_runs(
      out, places.size(), 2,
      [&](size_t begin, size_t i) {
        return places[i].buffer - places[i - 1].buffer ==
                   places[begin + 1].buffer - places[begin].buffer &&
               places[i].offset - places[i - 1].offset ==
                   places[begin + 1].offset - places[begin].offset;
      },
      [&](size_t begin, size_t count) {
        const KvPlace& first = places[begin];
        const KvPlace& next = places[count > 1 ? begin + 1 : begin];
        base::put_number(out, first.buffer);
        base::put_number(out, next.buffer - first.buffer);
        base::put_number(out, first.offset);
        base::put_number(out, next.offset - first.offset);
      });
}

// Reads runs until `limit` entries are there; false, and no more memory, where there are too many.
template <typename Take>
bool take_runs(base::WireReader& in, size_t limit, const Take& take) {
  const auto runs = in.number<uint16_t>();
  size_t total = 0;
  for (uint16_t run = 0; run < runs && !in.failed(); ++run) {
    const auto count = in.number<uint16_t>();
    total += count;
    if (total > limit) return false;
    take(count);
  }
  return !in.failed();
}

bool take_layers(base::WireReader& in, size_t limit, std::vector<uint32_t>& layers) {
  return take_runs(in, limit, [&](uint16_t count) {
    const auto first = in.number<uint32_t>();
    const auto step = in.number<uint32_t>();
    if (in.failed()) return;
    for (uint32_t i = 0; i < count; ++i) layers.push_back(first + i * step);
  });
}

bool take_places(base::WireReader& in, size_t limit, std::vector<KvPlace>& places) {
  return take_runs(in, limit, [&](uint16_t count) {
    const auto buffer = in.number<uint32_t>();
    const auto buffer_step = in.number<uint32_t>();
    const auto offset = in.number<uint64_t>();
    const auto offset_step = in.number<uint64_t>();
    if (in.failed()) return;
    for (uint32_t i = 0; i < count; ++i) {
      places.push_back({buffer + i * buffer_step, offset + i * offset_step});
    }
  });
}

bool take_field(base::WireReader& in, size_t layers, bool packed, KvField& field) {
  field.role = static_cast<KvRole>(in.number<uint8_t>());
  field.dtype = static_cast<KvDtype>(in.number<uint8_t>());
  const auto per_block = in.number<uint8_t>();
  field.per_block = per_block != 0;
  field.width = in.number<uint32_t>();
  for (uint64_t* stride :
       {&field.block_stride, &field.token_stride, &field.head_stride, &field.element_stride}) {
    *stride = in.number<uint64_t>();
  }
  if (per_block > 1 || !take_places(in, layers, field.places)) return false;
  if (packed) {
    field.row_tokens = in.number<uint32_t>();
    field.runs = in.number<uint32_t>();
    field.run_stride = in.number<uint64_t>();
    field.order = in.text(KvLayout::kMaxOrder);
  }
  return !in.failed();
}

bool take_group(base::WireReader& in, size_t max_layers, bool packed, KvGroup& group) {
  if (!take_layers(in, max_layers, group.layers)) return false;
  for (uint32_t* number : {&group.blocks, &group.block_tokens, &group.window, &group.total_heads,
                           &group.first_head, &group.heads}) {
    *number = in.number<uint32_t>();
  }
  const size_t fields = in.number<uint8_t>();
  if (fields > KvLayout::kMaxFields) return false;
  group.fields.resize(fields);
  return std::all_of(group.fields.begin(), group.fields.end(), [&](KvField& field) {
    return take_field(in, group.layers.size(), packed, field);
  });
}

bool take_layout(base::WireReader& in, KvLayout& layout) {
  const auto version = in.number<uint8_t>();
  if (version != kVersion && version != kPackedVersion) return false;
  const bool buffers = take_runs(in, KvLayout::kMaxBuffers, [&](uint16_t count) {
    KvBuffer buffer;
    buffer.bytes = in.number<uint64_t>();
    buffer.device = static_cast<KvDevice>(in.number<uint8_t>());
    buffer.device_index = in.number<uint32_t>();
    if (!in.failed()) layout.buffers.insert(layout.buffers.end(), count, buffer);
  });
  const size_t groups = in.number<uint8_t>();
  if (!buffers || groups > KvLayout::kMaxGroups) return false;
  layout.groups.resize(groups);
  size_t layers_left = KvLayout::kMaxLayers;
  for (KvGroup& group : layout.groups) {
    if (!take_group(in, layers_left, version == kPackedVersion, group)) return false;
    layers_left -= group.layers.size();
  }
  layout.format = in.text(KvLayout::kMaxFormat);
  for (std::string* text : {&layout.model.weights, &layout.model.dtype, &layout.model.rope}) {
    *text = in.text(KvLayout::kMaxModel);
  }
  // One layout has one form.
  return in.finished() && has_packed(layout) == (version == kPackedVersion);
}

}  // namespace

std::string KvLayout::encode() const {
  std::string out;
  const bool packed = has_packed(*this);
  base::put_number(out, packed ? kPackedVersion : kVersion);
  put_runs(
      out, buffers.size(), 1, [&](size_t begin, size_t i) { return buffers[i] == buffers[begin]; },
      [&](size_t begin, size_t) {
        base::put_number(out, buffers[begin].bytes);
        base::put_number(out, static_cast<uint8_t>(buffers[begin].device));
        base::put_number(out, buffers[begin].device_index);
      });
  base::put_number(out, static_cast<uint8_t>(groups.size()));
  for (const KvGroup& group : groups) {
    put_layers(out, group.layers);
    for (uint32_t number : {group.blocks, group.block_tokens, group.window, group.total_heads,
                            group.first_head, group.heads}) {
      base::put_number(out, number);
    }
    base::put_number(out, static_cast<uint8_t>(group.fields.size()));
    for (const KvField& field : group.fields) {
      base::put_number(out, static_cast<uint8_t>(field.role));
      base::put_number(out, static_cast<uint8_t>(field.dtype));
      base::put_number(out, static_cast<uint8_t>(field.per_block));
      base::put_number(out, field.width);
      for (uint64_t stride :
           {field.block_stride, field.token_stride, field.head_stride, field.element_stride}) {
        base::put_number(out, stride);
      }
      put_places(out, field.places);
      if (!packed) continue;
      base::put_number(out, field.row_tokens);
      base::put_number(out, field.runs);
      base::put_number(out, field.run_stride);
      base::put_text(out, field.order);
    }
  }
  base::put_text(out, format);
  for (const std::string* text : {&model.weights, &model.dtype, &model.rope})
    base::put_text(out, *text);
  return out;
}

absl::StatusOr<KvLayout> KvLayout::decode(std::string_view bytes) {
  base::WireReader in(bytes);
  KvLayout layout;
  if (!take_layout(in, layout)) {
    return absl::InvalidArgumentError("KV layout: truncated, overlong or of another release");
  }
  if (absl::Status status = layout.check(); !status.ok()) return status;
  return layout;
}

}  // namespace baton::kvtransfer
