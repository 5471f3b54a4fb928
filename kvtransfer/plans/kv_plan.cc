// Plans: which layers and heads two workers share, and the transfers that a request makes of them.
#include "kvtransfer/kv_plan.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvtransfer/plans/kv_boxes.h"

namespace baton::kvtransfer {
namespace {

// Blocks of a sequence in a worker's cache, and which units of each.
struct Side {
  const uint32_t* pages = nullptr;
  uint64_t count = 0;
  uint64_t first_unit = 0;  // of every page
  uint64_t units = 0;
};

absl::Status check_identity(const KvLayout& source, const KvLayout& target) {
  const auto quoted = [](const std::string& text) { return absl::StrCat("\"", text, "\""); };
  constexpr char kSameModel[] =
      "serve the same checkpoint, with the same config and arithmetic, on both workers";
  if (source.format != target.format) {
    return kv_mismatch("the format of a block", quoted(source.format), quoted(target.format),
                       "run the same release with the same KV data type on both workers");
  }
  if (source.model.weights != target.model.weights) {
    return kv_mismatch("the model", quoted(source.model.weights), quoted(target.model.weights),
                       kSameModel);
  }
  if (source.model.dtype != target.model.dtype) {
    return kv_mismatch("the model's data type", quoted(source.model.dtype),
                       quoted(target.model.dtype), kSameModel);
  }
  if (source.model.rope != target.model.rope) {
    return kv_mismatch("the model's rotary embedding", quoted(source.model.rope),
                       quoted(target.model.rope), kSameModel);
  }
  return absl::OkStatus();
}

std::string window_name(uint32_t window) {
  return window == 0 ? "all tokens" : absl::StrCat("the last ", window, " tokens");
}

// The layers that two groups have in common.
std::vector<KvPart::Layer> common_layers(const KvGroup& source, const KvGroup& target) {
  std::vector<KvPart::Layer> layers;
  for (uint32_t s = 0, t = 0; s < source.layers.size() && t < target.layers.size();) {
    if (source.layers[s] == target.layers[t]) {
      layers.push_back({source.layers[s], s, t});
      ++s;
      ++t;
    } else if (source.layers[s] < target.layers[t]) {
      ++s;
    } else {
      ++t;
    }
  }
  return layers;
}

}  // namespace

// Units that lie in some blocks of the source and some of the target, all of them the same way.
struct KvPlan::Segment {
  Side source;
  Side target;
  KvTokens tokens;
};

absl::Status check_kv_pages(const char* side, const KvGroup& group, const KvPages& pages,
                            KvTokens tokens) {
  const uint64_t first = tokens.begin / group.block_tokens;
  const uint64_t end = (tokens.end - 1) / group.block_tokens + 1;
  if (first < pages.first_block || end - pages.first_block > pages.pages.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the ", side, "'s pages are for blocks [", pages.first_block, ", ",
                     pages.first_block + pages.pages.size(), ") of the sequence, but tokens [",
                     tokens.begin, ", ", tokens.end, ") are in blocks [", first, ", ", end, ")"));
  }
  const auto used = pages.pages.subspan(first - pages.first_block, end - first);
  const uint32_t largest = *std::max_element(used.begin(), used.end());
  if (largest >= group.blocks) {
    return absl::InvalidArgumentError(
        absl::StrCat("the ", side, " names page ", largest, " of a cache that has ", group.blocks));
  }
  return absl::OkStatus();
}

KvHeads shard_heads(uint32_t total_heads, uint32_t ranks, uint32_t rank) {
  if (rank >= ranks) return {0, 0};
  const auto at = [&](uint64_t r) { return static_cast<uint32_t>(r * total_heads / ranks); };
  if (ranks <= total_heads) return {at(rank), at(uint64_t{rank} + 1)};
  return {at(rank), at(rank) + 1};
}

KvHeads share_of_rank(uint32_t total_heads, uint32_t ranks, uint32_t rank, KvHeads wanted,
                      uint64_t turn) {
  const KvHeads held = shard_heads(total_heads, ranks, rank);
  const KvHeads share{std::max(held.first, wanted.first), std::min(held.end, wanted.end)};
  if (share.empty()) return {0, 0};
  if (ranks > total_heads) {
    // Ranks [first, end) hold this head.
    const auto first_of = [&](uint64_t head) {
      return (head * ranks + total_heads - 1) / total_heads;
    };
    const uint64_t first = first_of(held.first);
    const uint64_t end = first_of(uint64_t{held.first} + 1);
    if (first + turn % (end - first) != rank) return {0, 0};
  }
  return share;
}

std::vector<uint32_t> ranks_heard(uint32_t total_heads, uint32_t sources, uint32_t targets,
                                  uint32_t rank) {
  if (total_heads == 0 || rank >= targets) return {};
  std::vector<bool> needed(sources, false);
  std::vector<bool> heard(sources, false);
  for (uint32_t target = 0; target < targets; ++target) {
    const KvHeads wanted = shard_heads(total_heads, targets, target);
    for (uint32_t source = 0; source < sources; ++source) {
      if (share_of_rank(total_heads, sources, source, wanted, target).empty()) continue;
      needed[source] = true;
      if (target == rank) heard[source] = true;
    }
  }
  std::vector<uint32_t> out;
  for (uint32_t source = 0; source < sources; ++source) {
    if (heard[source] || (!needed[source] && source % targets == rank)) out.push_back(source);
  }
  return out;
}

KvTokens KvPart::kept(KvTokens tokens, uint64_t length) const {
  if (window == 0 || length <= window) return tokens;
  return {std::max(tokens.begin, length - window), tokens.end};
}

uint64_t KvPart::bytes_per_token() const {
  uint64_t bytes = 0;
  for (const KvBox& box : boxes) bytes += box.bytes_per_token;
  return bytes;
}

absl::StatusOr<KvPlan> KvPlan::make(const KvLayout& source, const KvLayout& target,
                                    const KvShare& share) {
  if (absl::Status status = source.check(); !status.ok()) return status;
  if (absl::Status status = target.check(); !status.ok()) return status;
  if (absl::Status status = check_identity(source, target); !status.ok()) return status;
  KvPlan plan;
  for (uint32_t s = 0; s < source.groups.size(); ++s) {
    for (uint32_t t = 0; t < target.groups.size(); ++t) {
      const KvGroup& from = source.groups[s];
      const KvGroup& to = target.groups[t];
      KvPart part;
      part.layers = common_layers(from, to);
      if (part.layers.empty()) continue;
      if (from.total_heads != to.total_heads) {
        return kv_mismatch("the model's number of KV heads", absl::StrCat(from.total_heads),
                           absl::StrCat(to.total_heads), "serve the same model on both workers");
      }
      if (from.window != 0 && (to.window == 0 || to.window > from.window)) {
        return kv_mismatch(absl::StrCat("the window of layer ", part.layers.front().layer),
                           window_name(from.window), window_name(to.window),
                           "keep as many tokens at the source as the target needs");
      }
      part.source_group = s;
      part.target_group = t;
      part.window = to.window;
      part.unit = std::gcd(from.block_tokens, to.block_tokens);
      const KvHeads wanted = share.heads(to.total_heads, {to.first_head, to.first_head + to.heads});
      part.heads = {std::max(from.first_head, wanted.first),
                    std::min(from.first_head + from.heads, wanted.end)};
      if (part.heads.empty()) part.heads = {to.first_head, to.first_head};
      const absl::Status status = make_boxes(source, target, part);
      if (!status.ok()) return status;
      plan.parts_.push_back(std::move(part));
    }
  }
  plan.source_ = source;
  plan.target_ = target;
  plan.share_ = share;
  return plan;
}

const KvPart* KvPlan::find_layer(uint32_t layer, uint32_t* index) const {
  for (const KvPart& part : parts_) {
    const auto found =
        std::lower_bound(part.layers.begin(), part.layers.end(), layer,
                         [](const KvPart::Layer& a, uint32_t number) { return a.layer < number; });
    if (found == part.layers.end() || found->layer != layer) continue;
    *index = static_cast<uint32_t>(found - part.layers.begin());
    return &part;
  }
  return nullptr;
}

bool KvPlan::complete() const {
  size_t layers = 0;
  for (const KvPart& part : parts_) {
    const KvGroup& target = target_.groups[part.target_group];
    const KvHeads share =
        share_.heads(target.total_heads, {target.first_head, target.first_head + target.heads});
    if (part.heads.empty() ? !share.empty() : part.heads != share) return false;
    layers += part.layers.size();
  }
  return layers == target_.layers();
}

absl::Status KvPlan::for_each_move(size_t part_number, KvTokens tokens, const KvPages& source,
                                   const KvPages& target, KvTokens layers,
                                   absl::FunctionRef<absl::Status(const KvMove&)> sink) const {
  if (part_number >= parts_.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("part ", part_number, " of a plan that has ", parts_.size()));
  }
  const KvPart& part = parts_[part_number];
  layers.end = std::min<uint64_t>(layers.end, part.layers.size());
  if (tokens.empty() || layers.empty() || part.boxes.empty()) return absl::OkStatus();
  const KvGroup& from = source_.groups[part.source_group];
  const KvGroup& to = target_.groups[part.target_group];
  if (absl::Status status = check_kv_pages("source", from, source, tokens); !status.ok())
    return status;
  if (absl::Status status = check_kv_pages("target", to, target, tokens); !status.ok())
    return status;

  const uint64_t unit = part.unit;
  const uint64_t from_units = from.block_tokens / unit;
  const uint64_t to_units = to.block_tokens / unit;
  const uint64_t both = std::lcm(from_units, to_units);
  const uint64_t end = (tokens.end - 1) / unit + 1;
  for (uint64_t at = tokens.begin / unit; at < end;) {
    const auto side = [&](uint64_t block, const KvPages& pages) {
      return Side{pages.pages.data() + (at / block - pages.first_block), 1, at % block, 0};
    };
    Segment segment{side(from_units, source), side(to_units, target), {}};
    uint64_t count;
    if (at % both == 0 && end - at >= both) {
      count = (end - at) / both * both;  // whole blocks of both
      segment.source.count = count / from_units;
      segment.target.count = count / to_units;
    } else if (from_units == 1) {  // whole blocks of the source, inside one of the target
      count = std::min(end - at, to_units - at % to_units);
      segment.source.count = count;
    } else if (to_units == 1) {
      count = std::min(end - at, from_units - at % from_units);
      segment.target.count = count;
    } else {  // inside one of both
      count = std::min({end - at, from_units - at % from_units, to_units - at % to_units});
    }
    segment.source.units = count / segment.source.count;
    segment.target.units = count / segment.target.count;
    segment.tokens = {std::max(at * unit, tokens.begin), std::min((at + count) * unit, tokens.end)};
    for (const KvBox& box : part.boxes) {
      if (absl::Status status = emit(part, box, segment, layers, sink); !status.ok()) return status;
    }
    at += count;
  }
  return absl::OkStatus();
}

absl::Status KvPlan::emit(const KvPart& part, const KvBox& box, const Segment& segment,
                          KvTokens layers,
                          absl::FunctionRef<absl::Status(const KvMove&)> sink) const {
  const KvGroup& from_group = source_.groups[part.source_group];
  const KvGroup& to_group = target_.groups[part.target_group];
  const KvField& from = from_group.fields[box.source_field];
  const KvField& to = to_group.fields[box.target_field];
  const auto place = [&](uint64_t index, bool source) -> const KvPlace& {
    const KvPart::Layer& layer = part.layers[index];
    return source ? from.places[layer.source_index] : to.places[layer.target_index];
  };

  KvBoxDims dims = box.dims;
  uint64_t piece = box.piece_bytes;
  const auto outer_dims = [](const Side& side) { return (side.count > 1) + (side.units > 1); };
  const size_t outer =
      static_cast<size_t>(std::max(outer_dims(segment.source), outer_dims(segment.target)));
  KvBoxDim layer_dim;
  bool layer_outside = false;
  const uint64_t count = layers.end - layers.begin;
  const bool one_run =
      count > 1 && box.same_layer_steps && outer + dims.size() < size_t{Layout::kMaxDims};
  if (one_run) {
    layer_dim = {count, place(1, true).offset - place(0, true).offset,
                 place(1, false).offset - place(0, false).offset};
    layer_outside =
        layer_dim.source_stride >= from.block_stride || layer_dim.target_stride >= to.block_stride;
    if (!layer_outside) {
      dims.push_back(layer_dim);
      coalesce(dims, piece);
    }
  }

  const auto layout_of = [&](const Side& side, bool source, uint64_t base) {
    const KvField& field = source ? from : to;
    const uint64_t unit_stride = source ? box.source_unit_stride : box.target_unit_stride;
    const uint64_t offset =
        base + (source ? box.source_offset : box.target_offset) + side.first_unit * unit_stride;
    std::array<Dim, 2 + 4> all;
    size_t used = 0;
    all[used++] = {side.count, field.block_stride, side.pages};
    all[used++] = {side.units, unit_stride, nullptr};
    for (const KvBoxDim& dim : dims) {
      all[used++] = {dim.count, source ? dim.source_stride : dim.target_stride, nullptr};
    }
    const Layout layout = Layout::box(offset, {all.data(), used}, piece);
    if (!layer_outside) return layout;
    return layout.repeated(count, source ? layer_dim.source_stride : layer_dim.target_stride);
  };

  const uint64_t step = one_run ? count : 1;
  for (uint64_t layer = layers.begin; layer < layers.end; layer += step) {
    const KvPlace& at_source = place(layer, true);
    const KvPlace& at_target = place(layer, false);
    KvMove move;
    move.source_buffer = at_source.buffer;
    move.target_buffer = at_target.buffer;
    move.source = layout_of(segment.source, true, at_source.offset);
    move.target = layout_of(segment.target, false, at_target.offset);
    move.first_layer = static_cast<uint32_t>(layer);
    move.layers = static_cast<uint32_t>(step);
    move.tokens = segment.tokens;
    move.counted_bytes = (segment.tokens.end - segment.tokens.begin) * step * box.bytes_per_token;
    if (absl::Status status = sink(move); !status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace baton::kvtransfer
