// Layouts of other engines' blocks: read, written and checked. Nothing in them is trusted.
#include "engine/handoff/foreign_layout.h"

#include <algorithm>
#include <string_view>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/files/json_fields.h"

namespace baton::engine::handoff {
namespace {

using nlohmann::json;

constexpr int64_t kMaxBlockTokens = 1 << 16;
constexpr int64_t kMaxHeads = 1 << 12;
constexpr int64_t kMaxHeadSize = 1 << 12;
constexpr int64_t kMaxBlockBytes = 1 << 28;
constexpr int64_t kMaxLayers = 1 << 12;
constexpr size_t kMaxLevels = 8;

struct Level {
  uint32_t count = 1;
  uint32_t stride = 0;
};

std::vector<uint32_t> counted(const std::vector<Level>& levels) {
  std::vector<uint32_t> places = {0};
  for (const Level& level : levels) {
    const size_t inner = places.size();
    for (uint32_t i = 1; i < level.count; ++i) {
      for (size_t j = 0; j < inner; ++j) places.push_back(places[j] + i * level.stride);
    }
  }
  return places;
}

// The least number of levels that count like this; as many as there are places where nothing does.
std::vector<Level> levels_of(const std::vector<uint32_t>& places) {
  std::vector<Level> levels;
  size_t unit = 1;  // places that the levels so far count
  while (unit < places.size()) {
    const uint32_t stride = places[unit] - places[0];
    size_t count = 1;
    for (size_t wanted = places.size() / unit; wanted > 1; --wanted) {
      if (places.size() / unit % wanted != 0) continue;
      bool straight = true;
      for (size_t i = 0; i < wanted && straight; ++i) {
        straight = places[i * unit] == places[0] + i * stride;
      }
      if (!straight) continue;
      count = wanted;
      break;
    }
    if (count == 1) break;
    levels.push_back({static_cast<uint32_t>(count), stride});
    unit *= count;
  }
  return levels;
}

absl::Status wrong(const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat("its layout is not understood: ", what));
}

absl::StatusOr<std::vector<uint32_t>> read_axis(const json& places, const char* name, uint32_t size,
                                                int64_t numbers) {
  const json& said = member(places, name);
  if (!said.is_array() || said.size() > kMaxLevels) {
    return wrong(absl::StrCat("\"", name, "\" is not a list of levels"));
  }
  std::vector<Level> levels;
  uint64_t product = 1, reach = 0;
  for (const json& level : said) {
    if (!level.is_array() || level.size() != 2 || !level[0].is_number_integer() ||
        !level[1].is_number_integer() || level[0] < 1 || level[0] > int64_t{size} || level[1] < 0 ||
        level[1] >= numbers) {
      return wrong(absl::StrCat("a level of \"", name, "\" is out of range"));
    }
    levels.push_back({level[0].get<uint32_t>(), level[1].get<uint32_t>()});
    product *= levels.back().count;
    reach += uint64_t{levels.back().count - 1} * levels.back().stride;
    if (product > size) break;
  }
  if (reach >= static_cast<uint64_t>(numbers)) {
    return wrong(absl::StrCat("\"", name, "\" goes beyond its block"));
  }
  if (product != size) {
    return wrong(absl::StrCat("the levels of \"", name, "\" count ", product, ", not ", size));
  }
  return counted(levels);
}

absl::StatusOr<ForeignPlaces> read_places(const json& said, const ForeignLayout& layout) {
  const int64_t numbers = layout.bytes / static_cast<int64_t>(bytes_of(layout.dtype));
  ForeignPlaces places;
  const absl::StatusOr<int64_t> start = int_field(said, "start", 0, numbers - 1, 0);
  if (!start.ok()) return start.status();
  places.start = static_cast<uint32_t>(*start);
  for (const auto& [name, size, out] :
       {std::tuple{"heads", layout.heads, &places.heads},
        std::tuple{"tokens", layout.block_tokens, &places.tokens},
        std::tuple{"elements", layout.head_size, &places.elements}}) {
    absl::StatusOr<std::vector<uint32_t>> axis = read_axis(said, name, size, numbers);
    if (!axis.ok()) return axis.status();
    *out = *std::move(axis);
  }
  return places;
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
    for (const Level& level : levels_of(*axis)) {
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
  ForeignLayout layout;
  const absl::StatusOr<int64_t> tokens = int_field(said, "block_tokens", 1, kMaxBlockTokens, 0);
  const absl::StatusOr<int64_t> heads = int_field(said, "heads", 1, kMaxHeads, 0);
  const absl::StatusOr<int64_t> size = int_field(said, "head_size", 1, kMaxHeadSize, 0);
  const absl::StatusOr<int64_t> bytes = int_field(said, "bytes", 1, kMaxBlockBytes, 0);
  const absl::StatusOr<std::string> dtype = string_field(said, "dtype", "");
  for (const absl::Status& status :
       {tokens.status(), heads.status(), size.status(), bytes.status(), dtype.status()}) {
    if (!status.ok()) return wrong(std::string(status.message()));
  }
  if (*tokens == 0 || *heads == 0 || *size == 0 || *bytes == 0) {
    return wrong("it lacks block_tokens, heads, head_size or bytes");
  }
  layout.block_tokens = static_cast<uint32_t>(*tokens);
  layout.heads = static_cast<uint32_t>(*heads);
  layout.head_size = static_cast<uint32_t>(*size);
  layout.bytes = static_cast<uint32_t>(*bytes);
  if (*dtype != name_of(ForeignDtype::kBfloat16) && *dtype != name_of(ForeignDtype::kFloat32)) {
    return absl::FailedPreconditionError(
        absl::StrCat("its cache is of ", *dtype, ", and only bfloat16 and float32 are converted"));
  }
  layout.dtype =
      *dtype == name_of(ForeignDtype::kFloat32) ? ForeignDtype::kFloat32 : ForeignDtype::kBfloat16;
  const uint64_t numbers = uint64_t{2} * layout.heads * layout.block_tokens * layout.head_size;
  if (layout.bytes % bytes_of(layout.dtype) != 0 ||
      numbers > layout.bytes / bytes_of(layout.dtype)) {
    return wrong(absl::StrCat(numbers, " numbers in blocks of ", layout.bytes, " bytes"));
  }
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
  absl::StatusOr<ForeignPlaces> key = read_places(member(said, "key"), layout);
  if (!key.ok()) return key.status();
  absl::StatusOr<ForeignPlaces> value = read_places(member(said, "value"), layout);
  if (!value.ok()) return value.status();
  layout.key = *std::move(key);
  layout.value = *std::move(value);
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
