// Layouts of other engines' blocks: read, written and checked. Nothing in them is trusted.
#include "engine/handoff/foreign_layout.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/files/json_fields.h"

namespace baton::engine::handoff {
namespace {

using kvtransfer::KvDtype;
using kvtransfer::KvPacking;
using nlohmann::json;

constexpr uint64_t kMaxBlockBytes = 1 << 28;
constexpr int64_t kMaxLayers = 1 << 12;

absl::Status wrong(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("its layout is not understood: ", what));
}

// Marks the places of a block that are used; false where one is used already.
bool mark(const KvPacking::Places& places, std::vector<bool>* used) {
  const std::vector<uint64_t> tokens = steps_of(places.tokens);
  const std::vector<uint64_t> elements = steps_of(places.elements);
  for (const uint64_t head : steps_of(places.heads)) {
    for (const uint64_t token : tokens) {
      for (const uint64_t element : elements) {
        const uint64_t at = places.start + head + token + element;
        if ((*used)[at]) return false;
        (*used)[at] = true;
      }
    }
  }
  return true;
}

KvPacking::Axis axis(uint64_t count, uint64_t stride) {
  return count > 1 ? KvPacking::Axis{{count, stride}} : KvPacking::Axis{};
}

}  // namespace

ForeignLayout ForeignLayout::own(const KvGeometry& geometry, uint32_t ranks, uint32_t rank) {
  ForeignLayout layout;
  layout.block_tokens = static_cast<uint32_t>(geometry.block_tokens);
  layout.heads = static_cast<uint32_t>(geometry.kv_heads);
  layout.total_heads = layout.heads * ranks;
  layout.first_head = layout.heads * rank;
  layout.head_size = static_cast<uint32_t>(geometry.head_dim);
  layout.bytes = geometry.block_bytes();
  layout.dtype = KvDtype::kBfloat16;
  for (int i = 0; i < geometry.layers; ++i) layout.layers.push_back(static_cast<uint32_t>(i));
  const uint64_t half = uint64_t{layout.block_tokens} * layout.head_size;
  layout.key = {.start = 0,
                .tokens = axis(layout.block_tokens, 1),
                .heads = axis(layout.heads, 2 * half),
                .elements = axis(layout.head_size, layout.block_tokens)};
  layout.value = {.start = half,
                  .tokens = axis(layout.block_tokens, layout.head_size),
                  .heads = layout.key.heads,
                  .elements = axis(layout.head_size, 1)};
  return layout;
}

absl::StatusOr<ForeignLayout> ForeignLayout::parse(const json& said) {
  if (said.is_string()) {
    return absl::FailedPreconditionError(
        absl::StrCat("its cache cannot be converted: ", said.get<std::string>()));
  }
  if (!said.is_object()) return wrong("it does not describe its cache");
  absl::StatusOr<KvPacking> packing = kvtransfer::read_packing(said.dump());
  if (!packing.ok()) return wrong(packing.status().message());
  if (packing->whole.has_value()) return wrong("it does not say where its numbers lie");
  if (packing->dtype != KvDtype::kBfloat16 && packing->dtype != KvDtype::kFloat32) {
    return absl::FailedPreconditionError(
        absl::StrCat("its cache is of ", said["dtype"].get<std::string>(),
                     ", and only bfloat16 and float32 are converted"));
  }
  // Each step takes memory below.
  const uint64_t room = packing->bytes / bytes_of(packing->dtype);
  const double numbers = 2.0 * packing->heads * packing->block_tokens * packing->head_size;
  if (packing->bytes > kMaxBlockBytes || packing->bytes % bytes_of(packing->dtype) != 0 ||
      numbers > static_cast<double>(room)) {
    return wrong(absl::StrCat(numbers, " numbers in blocks of ", packing->bytes, " bytes"));
  }
  ForeignLayout layout{*std::move(packing), {}};
  const json& layers = member(said, "layers");
  if (!layers.is_array() || layers.empty() || layers.size() > size_t{kMaxLayers}) {
    return wrong("it does not list its layers");
  }
  for (const json& layer : layers) {
    if (!layer.is_number_integer() || layer < 0 || layer >= kMaxLayers) {
      return wrong("a layer's number is out of range");
    }
    layout.layers.push_back(layer.get<uint32_t>());
  }
  std::vector<bool> used(room);
  if (!mark(layout.key, &used) || !mark(layout.value, &used)) {
    return wrong("two of its numbers would overlap");
  }
  return layout;
}

json ForeignLayout::say() const {
  json said = json::parse(write_packing(*this));
  said["layers"] = layers;
  return said;
}

absl::Status ForeignLayout::place(const KvGeometry& geometry, uint32_t total, uint32_t ranks,
                                  uint32_t rank) {
  const kvtransfer::KvHeads usual = kvtransfer::shard_heads(total, ranks, rank);
  if (total_heads == heads && usual.end - usual.first == heads) {
    total_heads = total;
    first_head = usual.first;
  }
  if (total_heads != total || head_size != static_cast<uint32_t>(geometry.head_dim)) {
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", rank, " of ", ranks, " has ", heads, " KV heads of ", head_size,
                     " in its cache, and this model has ", total, " of ", geometry.head_dim,
                     ": give both the same model"));
  }
  std::vector<uint32_t> sorted = layers;
  std::sort(sorted.begin(), sorted.end());
  bool all = sorted.size() == static_cast<size_t>(geometry.layers);
  for (size_t i = 0; i < sorted.size() && all; ++i) all = sorted[i] == i;
  if (!all) {
    return absl::FailedPreconditionError(
        absl::StrCat("its cache does not have each of this model's ", geometry.layers,
                     " layers once: it has ", layers.size()));
  }
  return absl::OkStatus();
}

absl::StatusOr<ForeignLayout> ForeignLayout::part(kvtransfer::KvHeads some) const {
  if (some == held()) return *this;
  ForeignLayout out = *this;
  if (key.heads.size() != 1 || value.heads.size() != 1) {
    return absl::FailedPreconditionError(
        "its heads are packed in tiles, which cannot be shared out: use as many tensor-parallel "
        "ranks at both ends");
  }
  out.heads = some.end - some.first;
  out.first_head = some.first;
  for (KvPacking::Places* places : {&out.key, &out.value}) {
    places->start += (some.first - first_head) * places->heads[0].stride;
    places->heads = axis(out.heads, places->heads[0].stride);
  }
  return out;
}

}  // namespace baton::engine::handoff
