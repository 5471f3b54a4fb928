// KV layouts and plans: the checks, the wire form, and the intersection of two shards.
#include "kvtransfer/kv_layout.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "transport/base/wire.h"

namespace baton::kvtransfer {
namespace {

constexpr uint64_t kTooMuch = std::numeric_limits<uint64_t>::max();

uint64_t saturating_add(uint64_t a, uint64_t b) {
  uint64_t sum;
  return __builtin_add_overflow(a, b, &sum) ? kTooMuch : sum;
}

uint64_t saturating_mul(uint64_t a, uint64_t b) {
  uint64_t product;
  return __builtin_mul_overflow(a, b, &product) ? kTooMuch : product;
}

// The dimensions of a cache that have more than one step, innermost (smallest stride) first.
struct Step {
  const char* name;
  uint64_t count;
  uint64_t stride;
};

std::array<Step, 3> steps_of(const KvLayout& layout) {
  std::array<Step, 3> steps = {Step{"layer", layout.layers, layout.layer_stride},
                               Step{"block", layout.blocks, layout.block_stride},
                               Step{"head", layout.heads, layout.head_stride}};
  std::sort(steps.begin(), steps.end(),
            [](const Step& a, const Step& b) { return a.stride < b.stride; });
  return steps;
}

absl::Status differs(absl::string_view what, absl::string_view source, absl::string_view target,
                     absl::string_view remedy) {
  return absl::FailedPreconditionError(absl::StrCat("KV layouts do not match: ", what, " is ",
                                                    source, " at the source (prefill) and ", target,
                                                    " at the target (decode); ", remedy));
}

Layout box_layout(const KvLayout& cache, uint64_t offset_in_block, const KvBox& box, uint32_t layer,
                  absl::Span<const uint32_t> blocks, uint64_t cache_offset) {
  const uint64_t offset = cache_offset + layer * cache.layer_stride + offset_in_block;
  const Dim pages{blocks.size(), cache.block_stride, blocks.data()};
  if (box.heads == 1 || cache.head_stride == cache.head_bytes) {
    return Layout::box(offset, {&pages, 1}, size_t{box.heads} * cache.head_bytes);
  }
  const std::array<Dim, 2> dims = {pages, Dim{box.heads, cache.head_stride, nullptr}};
  return Layout::box(offset, dims, cache.head_bytes);
}

}  // namespace

KvLayout KvLayout::dense(uint32_t layers, uint32_t blocks, uint32_t block_tokens, uint32_t heads,
                         uint32_t head_bytes, std::string format) {
  KvLayout layout;
  layout.layers = layers;
  layout.blocks = blocks;
  layout.block_tokens = block_tokens;
  layout.total_heads = heads;
  layout.heads = heads;
  layout.head_bytes = head_bytes;
  layout.head_stride = head_bytes;
  layout.block_stride = saturating_mul(heads, layout.head_stride);
  layout.layer_stride = saturating_mul(blocks, layout.block_stride);
  layout.format = std::move(format);
  return layout;
}

uint64_t KvLayout::bytes() const {
  if (layers == 0 || blocks == 0 || heads == 0) return 0;
  uint64_t extent = head_bytes;
  for (const Step& step : steps_of(*this)) {
    extent = saturating_add(extent, saturating_mul(step.count - 1, step.stride));
  }
  return extent;
}

absl::Status KvLayout::check() const {
  const auto invalid = [](const auto&... parts) {
    return absl::InvalidArgumentError(absl::StrCat("KV layout: ", parts...));
  };
  if (layers == 0 || blocks == 0 || block_tokens == 0 || heads == 0 || head_bytes == 0) {
    return invalid("layers, blocks, block_tokens, heads and head_bytes must be at least 1, not ",
                   layers, ", ", blocks, ", ", block_tokens, ", ", heads, ", ", head_bytes);
  }
  if (layers > kMaxLayers) return invalid(layers, " layers; at most ", kMaxLayers, " are possible");
  if (format.size() > kMaxFormat) {
    return invalid("the format's name has ", format.size(), " bytes; at most ", kMaxFormat);
  }
  if (model.size() > kMaxModel) {
    return invalid("the model's name has ", model.size(), " bytes; at most ", kMaxModel);
  }
  if (heads > total_heads || first_head > total_heads - heads) {
    return invalid("heads [", first_head, ", ", uint64_t{first_head} + heads,
                   ") are not among the model's ", total_heads);
  }
  uint64_t extent = head_bytes;
  for (const Step& step : steps_of(*this)) {
    if (step.count == 1) continue;
    if (step.stride < extent) {
      return invalid("a ", step.name, " stride of ", step.stride, " bytes is less than the ",
                     extent, " bytes that lie between two of them");
    }
    extent = saturating_add(extent, saturating_mul(step.count - 1, step.stride));
  }
  // Every offset then fits in an int64_t, with room for where the cache begins in its region.
  if (bytes() > uint64_t{1} << 60) return invalid("the cache would be larger than 2^60 bytes");
  return absl::OkStatus();
}

std::string KvLayout::encode() const {
  std::string out;
  for (uint32_t number :
       {layers, blocks, block_tokens, total_heads, first_head, heads, head_bytes}) {
    put_number(out, number);
  }
  for (uint64_t stride : {layer_stride, block_stride, head_stride}) put_number(out, stride);
  put_text(out, format);
  put_text(out, model);
  return out;
}

absl::StatusOr<KvLayout> KvLayout::decode(std::string_view bytes) {
  WireReader in(bytes);
  KvLayout layout;
  for (uint32_t* number :
       {&layout.layers, &layout.blocks, &layout.block_tokens, &layout.total_heads,
        &layout.first_head, &layout.heads, &layout.head_bytes}) {
    *number = in.number<uint32_t>();
  }
  for (uint64_t* stride : {&layout.layer_stride, &layout.block_stride, &layout.head_stride}) {
    *stride = in.number<uint64_t>();
  }
  layout.format = in.text(kMaxFormat);
  layout.model = in.text(kMaxModel);
  if (!in.finished()) return absl::InvalidArgumentError("KV layout: truncated or overlong");
  if (absl::Status status = layout.check(); !status.ok()) return status;
  return layout;
}

absl::StatusOr<KvPlan> KvPlan::make(const KvLayout& source, const KvLayout& target) {
  if (absl::Status status = source.check(); !status.ok()) return status;
  if (absl::Status status = target.check(); !status.ok()) return status;
  const auto number = [](uint64_t n) { return absl::StrCat(n); };
  if (source.format != target.format) {
    return differs("the format of a block", absl::StrCat("\"", source.format, "\""),
                   absl::StrCat("\"", target.format, "\""),
                   "run the same release with the same KV data type on both workers");
  }
  if (source.model != target.model) {
    return differs("the model", absl::StrCat("\"", source.model, "\""),
                   absl::StrCat("\"", target.model, "\""),
                   "serve the same checkpoint, with the same config, on both workers");
  }
  if (source.layers != target.layers) {
    return differs("the number of layers", number(source.layers), number(target.layers),
                   "serve the same model on both workers");
  }
  if (source.total_heads != target.total_heads) {
    return differs("the model's number of KV heads", number(source.total_heads),
                   number(target.total_heads), "serve the same model on both workers");
  }
  if (source.block_tokens != target.block_tokens) {
    return differs("the number of tokens in a block", number(source.block_tokens),
                   number(target.block_tokens), "give both workers the same block size");
  }
  if (source.head_bytes != target.head_bytes) {
    return differs("the size of a head in a block", absl::StrCat(source.head_bytes, " bytes"),
                   absl::StrCat(target.head_bytes, " bytes"),
                   "serve the same model with the same KV data type on both workers");
  }

  KvPlan plan;
  plan.source_ = source;
  plan.target_ = target;
  const uint32_t first = std::max(source.first_head, target.first_head);
  const uint32_t end = std::min(source.first_head + source.heads, target.first_head + target.heads);
  if (first < end) {
    plan.boxes_.push_back({.source_offset = (first - source.first_head) * source.head_stride,
                           .target_offset = (first - target.first_head) * target.head_stride,
                           .heads = end - first});
  }
  return plan;
}

bool KvPlan::complete() const {
  uint32_t heads = 0;
  for (const KvBox& box : boxes_) heads += box.heads;
  return heads == target_.heads;
}

size_t KvPlan::bytes_per_block() const {
  size_t bytes = 0;
  for (const KvBox& box : boxes_) bytes += size_t{box.heads} * source_.head_bytes;
  return bytes;
}

Layout KvPlan::source_layout(const KvBox& box, uint32_t layer, absl::Span<const uint32_t> blocks,
                             uint64_t cache_offset) const {
  return box_layout(source_, box.source_offset, box, layer, blocks, cache_offset);
}

Layout KvPlan::target_layout(const KvBox& box, uint32_t layer, absl::Span<const uint32_t> blocks,
                             uint64_t cache_offset) const {
  return box_layout(target_, box.target_offset, box, layer, blocks, cache_offset);
}

}  // namespace baton::kvtransfer
