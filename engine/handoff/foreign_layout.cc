// Layouts of other engines' blocks: read, written and checked. Nothing in them is trusted.
#include "engine/handoff/foreign_layout.h"

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/files/json_fields.h"
#include "kvtransfer/kv_packing.h"

namespace baton::engine::handoff {
namespace {

using kvtransfer::KvDtype;
using kvtransfer::KvPacking;
using nlohmann::json;

constexpr uint64_t kMaxBlockBytes = 1 << 28;
constexpr int64_t kMaxLayers = 1 << 12;

std::vector<uint32_t> counted(const KvPacking::Axis& levels) {
  std::vector<uint32_t> places = {0};
  for (const KvPacking::Level& level : levels) {
    const size_t inner = places.size();
    for (uint32_t i = 1; i < level.count; ++i) {
      for (size_t j = 0; j < inner; ++j) {
        places.push_back(places[j] + i * static_cast<uint32_t>(level.stride));
      }
    }
  }
  return places;
}

ForeignPlaces places_of(const KvPacking::Places& said) {
  return {.start = static_cast<uint32_t>(said.start),
          .heads = counted(said.heads),
          .tokens = counted(said.tokens),
          .elements = counted(said.elements)};
}

absl::Status wrong(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("its layout is not understood: ", what));
}

// Marks the places of a block that are used; false where one is beyond it, or used already.
bool mark(const ForeignPlaces& places, std::vector<bool>* used) {
  for (const uint64_t head : places.heads) {
    for (const uint64_t token : places.tokens) {
      for (const uint64_t element : places.elements) {
        const uint64_t at = places.start + head + token + element;
        if (at >= used->size() || (*used)[at]) return false;
        (*used)[at] = true;
      }
    }
  }
  return true;
}

json say_places(const ForeignPlaces& places) {
  json said = {{"start", places.start}};
  for (const auto& [name, axis] :
       {std::pair{"heads", &places.heads}, std::pair{"tokens", &places.tokens},
        std::pair{"elements", &places.elements}}) {
    said[name] = json::array();
    const std::vector<int64_t> steps(axis->begin(), axis->end());
    const std::optional<KvPacking::Axis> levels = kvtransfer::levels_of(steps);
    for (const KvPacking::Level& level : *levels) {
      said[name].push_back({level.count, level.stride});
    }
  }
  return said;
}

std::string_view name_of(ForeignDtype dtype) {
  return dtype == ForeignDtype::kBfloat16 ? "bfloat16" : "float32";
}

}  // namespace

ForeignLayout ForeignLayout::own(const KvGeometry& geometry) {
  ForeignLayout layout;
  layout.block_tokens = static_cast<uint32_t>(geometry.block_tokens);
  layout.heads = static_cast<uint32_t>(geometry.kv_heads);
  layout.head_size = static_cast<uint32_t>(geometry.head_dim);
  layout.bytes = static_cast<uint32_t>(geometry.block_bytes());
  for (int i = 0; i < geometry.layers; ++i) layout.layers.push_back(static_cast<uint32_t>(i));
  const uint32_t half = layout.block_tokens * layout.head_size;
  const std::vector<uint32_t> heads = counted({{layout.heads, 2 * half}});
  layout.key = {.start = 0,
                .heads = heads,
                .tokens = counted({{layout.block_tokens, 1}}),
                .elements = counted({{layout.head_size, layout.block_tokens}})};
  layout.value = {.start = half,
                  .heads = heads,
                  .tokens = counted({{layout.block_tokens, layout.head_size}}),
                  .elements = counted({{layout.head_size, 1}})};
  return layout;
}

absl::StatusOr<ForeignLayout> ForeignLayout::parse(const json& said) {
  if (said.is_string()) {
    return absl::FailedPreconditionError(
        absl::StrCat("its cache cannot be converted: ", said.get<std::string>()));
  }
  if (!said.is_object()) return wrong("it does not describe its cache");
  const absl::StatusOr<KvPacking> packing = kvtransfer::read_packing(said.dump());
  if (!packing.ok()) return wrong(packing.status().message());
  if (packing->whole.has_value()) return wrong("it does not say where its numbers lie");
  ForeignLayout layout;
  switch (packing->dtype) {
    case KvDtype::kBfloat16:
      layout.dtype = ForeignDtype::kBfloat16;
      break;
    case KvDtype::kFloat32:
      layout.dtype = ForeignDtype::kFloat32;
      break;
    default:
      return absl::FailedPreconditionError(
          absl::StrCat("its cache is of ", said["dtype"].get<std::string>(),
                       ", and only bfloat16 and float32 are converted"));
  }
  // Each step takes memory below.
  const double numbers = 2.0 * packing->heads * packing->block_tokens * packing->head_size;
  if (packing->bytes > kMaxBlockBytes || packing->bytes % bytes_of(layout.dtype) != 0 ||
      numbers > static_cast<double>(packing->bytes / bytes_of(layout.dtype))) {
    return wrong(absl::StrCat(numbers, " numbers in blocks of ", packing->bytes, " bytes"));
  }
  layout.block_tokens = packing->block_tokens;
  layout.heads = packing->heads;
  layout.head_size = packing->head_size;
  layout.bytes = static_cast<uint32_t>(packing->bytes);
  layout.key = places_of(packing->key);
  layout.value = places_of(packing->value);
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
  std::vector<bool> used(layout.bytes / bytes_of(layout.dtype));
  if (!mark(layout.key, &used) || !mark(layout.value, &used)) {
    return wrong("two of its numbers would overlap, or one would be outside its block");
  }
  return layout;
}

json ForeignLayout::say() const {
  return {{"block_tokens", block_tokens},
          {"heads", heads},
          {"head_size", head_size},
          {"dtype", name_of(dtype)},
          {"bytes", bytes},
          {"layers", layers},
          {"key", say_places(key)},
          {"value", say_places(value)}};
}

absl::Status ForeignLayout::fits(const KvGeometry& geometry) const {
  if (heads != static_cast<uint32_t>(geometry.kv_heads) ||
      head_size != static_cast<uint32_t>(geometry.head_dim)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "its cache has ", heads, " KV heads of ", head_size, ", this model's ", geometry.kv_heads,
        " of ", geometry.head_dim, ": give both the same model, in one tensor-parallel rank each"));
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

}  // namespace baton::engine::handoff
