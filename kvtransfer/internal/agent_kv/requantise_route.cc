// The staging layout has all layers of a part one after the other, each of as many units as a slot
// holds: far more than there is. A chunk has a few of them, which lie close together in its slot;
// shift() says how far from where the layout has them.
#include "kvtransfer/internal/agent_kv/requantise_route.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_format.h"
#include "kvtransfer/internal/agent_kv/agent_converter.h"
#include "kvtransfer/plans/kv_boxes.h"
#include "kvtransfer/plans/kv_sides.h"

namespace baton::kvtransfer {
namespace {

// One unit of a part in staging memory: the fields of `like`, of the heads that move, without gaps.
// Rows are in the order of the other agent's cache, so that they travel in long pieces.
KvGroup staging_group(const KvGroup& like, const KvPart& part) {
  KvGroup out;
  for (const KvPart::Layer& layer : part.layers) out.layers.push_back(layer.layer);
  out.block_tokens = part.unit;
  out.window = part.window;
  out.total_heads = like.total_heads;
  out.first_head = part.heads.first;
  out.heads = part.heads.end - part.heads.first;
  uint64_t unit_bytes = 0;
  for (const KvField& field : like.fields) {
    KvField& copy = out.fields.emplace_back();
    copy.role = field.role;
    copy.dtype = field.dtype;
    copy.width = field.width;
    copy.element_stride = bytes_of(field.dtype);
    const uint64_t row = field.row_bytes();
    const bool tokens_inside = field.token_stride < field.head_stride;
    copy.token_stride = tokens_inside ? row : row * out.heads;
    copy.head_stride = tokens_inside ? row * part.unit : row;
    // 4 bytes before fp32, whatever the widths are.
    unit_bytes = (unit_bytes + 3) / 4 * 4;
    copy.places.assign(out.layers.size(), {0, unit_bytes});
    unit_bytes += row * out.heads * part.unit;
  }
  unit_bytes = (unit_bytes + 3) / 4 * 4;
  for (KvField& field : out.fields) field.block_stride = unit_bytes;
  return out;
}

// The number of the part with that group on one side.
template <typename Plan>
size_t part_of_group(const Plan& plan, bool source, uint32_t group) {
  size_t number = 0;
  while ((source ? plan.parts()[number].source_group : plan.parts()[number].target_group) !=
         group) {
    ++number;
  }
  return number;
}

}  // namespace

absl::StatusOr<RequantiseRoute> RequantiseRoute::make(Op op, const KvLayout& source,
                                                      const KvLayout& target, const KvShare& share,
                                                      uint64_t slot_bytes) {
  absl::StatusOr<KvRequantisePlan> whole = KvRequantisePlan::make(source, target, share);
  if (!whole.ok()) return whole.status();
  const bool writes = op == Op::kWrite;
  RequantiseRoute out;
  out.op_ = op;
  KvLayout staging;
  staging.model = source.model;
  staging.format = source.format;
  uint64_t end = 0;
  Part largest;
  for (size_t number = 0; number < whole->parts().size(); ++number) {
    const KvPart& part = whole->parts()[number];
    if (part.heads.empty()) continue;
    KvGroup group = staging_group(
        writes ? target.groups[part.target_group] : source.groups[part.source_group], part);
    Part& made = out.parts_.emplace_back();
    made.whole = number;
    made.unit = part.unit;
    made.unit_bytes = group.fields[0].block_stride;
    made.slot_units = std::min<uint64_t>(slot_bytes / made.unit_bytes, 1 << 20);
    if (made.unit_bytes > largest.unit_bytes) largest = made;
    made.base = end;
    made.layer_stride = made.unit_bytes * made.slot_units;
    group.blocks = static_cast<uint32_t>(made.slot_units);
    for (KvField& field : group.fields) {
      for (size_t i = 0; i < field.places.size(); ++i) {
        field.places[i].offset += made.base + i * made.layer_stride;
      }
    }
    end += group.layers.size() * made.layer_stride;
    staging.groups.push_back(std::move(group));
    out.pages_.resize(std::max<size_t>(out.pages_.size(), made.slot_units));
  }
  if (largest.unit_bytes > slot_bytes) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "%u tokens of a layer, which move together, need %u bytes of staging memory at a time, and "
        "there are %u: set AgentOptions::staging_bytes (staging_bytes of an agent in C and Python) "
        "to at least %u",
        largest.unit, largest.unit_bytes, slot_bytes,
        AgentConverter::staging_bytes(largest.unit_bytes)));
  }
  std::iota(out.pages_.begin(), out.pages_.end(), 0u);
  if (!out.parts_.empty()) {
    staging.buffers.resize(1);
    staging.buffers[0].bytes = end;
    absl::StatusOr<KvRequantisePlan> convert =
        writes ? KvRequantisePlan::make(source, staging) : KvRequantisePlan::make(staging, target);
    if (!convert.ok()) return convert.status();
    absl::StatusOr<KvPlan> wire =
        writes ? KvPlan::make(staging, target) : KvPlan::make(source, staging);
    if (!wire.ok()) return wire.status();
    out.convert_ = *std::move(convert);
    out.wire_ = *std::move(wire);
    for (uint32_t i = 0; i < out.parts_.size(); ++i) {
      out.parts_[i].convert = part_of_group(out.convert_, !writes, i);
      out.parts_[i].wire = part_of_group(out.wire_, writes, i);
    }
  }
  out.whole_ = *std::move(whole);
  return out;
}

void RequantiseRoute::cut(uint32_t part, KvTokens tokens, KvTokens layers,
                          std::vector<RequantiseChunk>& out) const {
  const Part& of = parts_[part];
  layers.end = std::min<uint64_t>(layers.end, whole_.parts()[of.whole].layers.size());
  const uint64_t first = tokens.begin / of.unit;
  const uint64_t end = (tokens.end - 1) / of.unit + 1;
  const uint64_t units = std::min(end - first, of.slot_units);
  const uint64_t together = std::max<uint64_t>(1, of.slot_units / units);  // layers
  for (uint64_t layer = layers.begin; layer < layers.end; layer += together) {
    for (uint64_t at = first; at < end; at += units) {
      out.push_back({part,
                     {at * of.unit, std::min(at + units, end) * of.unit},
                     {layer, std::min(layer + together, layers.end)}});
    }
  }
}

uint64_t RequantiseRoute::units(const RequantiseChunk& chunk) const {
  return (chunk.tokens.end - chunk.tokens.begin) / parts_[chunk.part].unit;
}

uint64_t RequantiseRoute::bytes(const RequantiseChunk& chunk) const {
  return (chunk.tokens.end - chunk.tokens.begin) * (chunk.layers.end - chunk.layers.begin) *
         wire_.parts()[parts_[chunk.part].wire].bytes_per_token();
}

uint64_t RequantiseRoute::shift(const RequantiseChunk& chunk, uint64_t layer) const {
  const Part& part = parts_[chunk.part];
  return (layer - chunk.layers.begin) * units(chunk) * part.unit_bytes -
         (part.base + layer * part.layer_stride);
}

KvPages RequantiseRoute::slot_pages(const RequantiseChunk& chunk) const {
  return {chunk.tokens.begin / parts_[chunk.part].unit,
          absl::MakeConstSpan(pages_).first(units(chunk))};
}

template <typename One>
absl::Status RequantiseRoute::for_each_layer(const RequantiseChunk& chunk,
                                             const KvPages& local_pages,
                                             absl::Span<std::byte* const> local, std::byte* slot,
                                             const One& one) const {
  const std::vector<const std::byte*> readable(local.begin(), local.end());
  const KvPages staged = slot_pages(chunk);
  for (uint64_t layer = chunk.layers.begin; layer < chunk.layers.end; ++layer) {
    auto* const shifted = reinterpret_cast<std::byte*>(
        static_cast<uintptr_t>(reinterpret_cast<uintptr_t>(slot) + shift(chunk, layer)));
    const size_t part = parts_[chunk.part].convert;
    const KvTokens number{layer, layer + 1};
    absl::Status status =
        op_ == Op::kWrite
            ? one(part, chunk.tokens, local_pages, staged, readable, {shifted}, number)
            : one(part, chunk.tokens, staged, local_pages, {shifted}, local, number);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status RequantiseRoute::convert(const RequantiseChunk& chunk, const KvPages& local_pages,
                                      absl::Span<std::byte* const> local, std::byte* slot) const {
  return for_each_layer(
      chunk, local_pages, local, slot,
      [&](size_t part, KvTokens tokens, const KvPages& source, const KvPages& target,
          absl::Span<const std::byte* const> from, absl::Span<std::byte* const> to,
          KvTokens layer) { return convert_.run(part, tokens, source, target, from, to, layer); });
}

absl::Status RequantiseRoute::for_each_box(const RequantiseChunk& chunk, const KvPages& local_pages,
                                           absl::Span<std::byte* const> local, std::byte* slot,
                                           absl::FunctionRef<void(const KvRowBox&)> sink) const {
  return for_each_layer(chunk, local_pages, local, slot,
                        [&](size_t part, KvTokens tokens, const KvPages& source,
                            const KvPages& target, absl::Span<const std::byte* const> from,
                            absl::Span<std::byte* const> to, KvTokens layer) {
                          return convert_.for_each_box(part, tokens, source, target, from, to,
                                                       layer, sink);
                        });
}

absl::Status RequantiseRoute::for_each_move(
    const RequantiseChunk& chunk, const KvPages& remote_pages,
    absl::FunctionRef<absl::Status(const KvMove&)> sink) const {
  const bool writes = op_ == Op::kWrite;
  const KvPages staged = slot_pages(chunk);
  for (uint64_t layer = chunk.layers.begin; layer < chunk.layers.end; ++layer) {
    const uint64_t by = shift(chunk, layer);
    const absl::Status status = wire_.for_each_move(
        parts_[chunk.part].wire, chunk.tokens, writes ? staged : remote_pages,
        writes ? remote_pages : staged, {layer, layer + 1}, [&](const KvMove& move) {
          KvMove there = move;
          Layout& side = writes ? there.source : there.target;
          side = shifted(side, by);
          return sink(there);
        });
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace baton::kvtransfer
