// Packed blocks: found, read, and made fields of a layout.
#include "kvtransfer/kv_packing.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvtransfer/plans/kv_extents.h"

namespace baton::kvtransfer {
namespace {

using nlohmann::json;

constexpr uint64_t kMostPacked = UINT32_MAX;  // of a block's numbers and bytes
constexpr size_t kMaxLevels = 8;              // of an axis

template <typename... Parts>
absl::Status bad_packing(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat("a packed block: ", parts...));
}

// --- read

std::optional<uint64_t> number_in(const json& said, const char* key) {
  const auto found = said.find(key);
  if (found == said.end() || !found->is_number_integer()) return std::nullopt;
  if (found->is_number_unsigned() ? found->get<uint64_t>() > kMostPacked
                                  : found->get<int64_t>() < 0) {
    return std::nullopt;
  }
  return found->get<uint64_t>();
}

// An axis of so many steps.
std::optional<KvPacking::Axis> axis_in(const json& said, const char* key, uint64_t steps) {
  const auto found = said.find(key);
  if (found == said.end() || !found->is_array() || found->size() > kMaxLevels) return std::nullopt;
  KvPacking::Axis out;
  uint64_t counted = 1;
  for (const json& level : *found) {
    if (!level.is_array() || level.size() != 2) return std::nullopt;
    const json named = {{"count", level[0]}, {"stride", level[1]}};
    const auto count = number_in(named, "count");
    const auto stride = number_in(named, "stride");
    if (!count || !stride || *count == 0) return std::nullopt;
    counted = saturating_mul(counted, *count);
    if (*count > 1) out.push_back({*count, *stride});
  }
  if (counted != steps) return std::nullopt;
  return out;
}

constexpr std::array<std::pair<const char*, KvDtype>, 7> kDtypes = {
    {{"uint8", KvDtype::kByte},
     {"int8", KvDtype::kInt8},
     {"float8_e4m3fn", KvDtype::kFloat8E4M3},
     {"float8_e5m2", KvDtype::kFloat8E5M2},
     {"float16", KvDtype::kFloat16},
     {"bfloat16", KvDtype::kBfloat16},
     {"float32", KvDtype::kFloat32}}};

std::optional<KvDtype> dtype_in(const json& said) {
  const auto found = said.find("dtype");
  if (found == said.end()) return std::nullopt;
  for (const auto& [name, dtype] : kDtypes) {
    if (*found == name) return dtype;
  }
  return std::nullopt;
}

std::string levels_text(absl::Span<const KvPacking::Level> levels) {
  std::string out;
  for (const KvPacking::Level& level : levels) {
    absl::StrAppend(&out, out.empty() ? "" : " ", level.count, "x", level.stride);
  }
  return out;
}

// The rows of K or V: a level of tokens from row to row, and what is inside one, in runs.
absl::Status fill_rows(const KvPacking::Places& places, uint64_t size, KvField& field) {
  KvPacking::Axis inside = places.tokens;
  if (!inside.empty()) {
    field.token_stride = inside.back().stride * size;
    inside.pop_back();
  }
  uint64_t row_tokens = 1;
  for (const KvPacking::Level& level : inside) row_tokens *= level.count;
  field.row_tokens = static_cast<uint32_t>(row_tokens);
  if (inside.empty() && places.elements.size() < 2) {  // a row of a token, with any step
    const KvPacking::Level step =
        places.elements.empty() ? KvPacking::Level{1, 1} : places.elements.front();
    field.width = static_cast<uint32_t>(step.count);
    field.element_stride = step.stride * size;
    return absl::OkStatus();
  }
  // The outermost stride of the elements may grow with a block; all others say how a run looks.
  const absl::Span<const KvPacking::Level> elements(places.elements);
  field.order =
      absl::StrCat("tokens ", levels_text(inside), ", elements ",
                   levels_text(elements.first(elements.empty() ? 0 : elements.size() - 1)));
  inside.insert(inside.end(), elements.begin(), elements.end());
  std::sort(inside.begin(), inside.end(), [](const KvPacking::Level& a, const KvPacking::Level& b) {
    return a.stride < b.stride;
  });
  uint64_t width = 1;
  size_t level = 0;
  while (level < inside.size() && inside[level].stride == width) width *= inside[level++].count;
  if (level + 1 < inside.size()) return bad_packing("a tile spans more than one level of runs");
  field.width = static_cast<uint32_t>(width);
  field.element_stride = size;
  if (level < inside.size()) {
    field.runs = static_cast<uint32_t>(inside[level].count);
    field.run_stride = inside[level].stride * size;
  }
  return absl::OkStatus();
}

absl::Status read_places(const json& said, const char* key, KvPacking& packing,
                         KvPacking::Places& places) {
  const auto found = said.find(key);
  if (found == said.end() || !found->is_object()) return bad_packing("\"", key, "\" is missing");
  const auto start = number_in(*found, "start");
  const auto by_token = axis_in(*found, "tokens", packing.block_tokens);
  const auto by_head = axis_in(*found, "heads", packing.heads);
  const auto by_element = axis_in(*found, "elements", packing.head_size);
  if (!start || !by_token || !by_head || !by_element) {
    return bad_packing("\"", key,
                       "\" has a \"start\", and \"tokens\", \"heads\" and \"elements\" as "
                       "[count, stride] that count all of them");
  }
  places = {*start, *by_token, *by_head, *by_element};
  uint64_t end = *start + 1;
  for (const KvPacking::Axis* axis : {&places.tokens, &places.heads, &places.elements}) {
    for (const KvPacking::Level& level : *axis) {
      end = saturating_add(end, saturating_mul(level.count - 1, level.stride));
    }
  }
  if (end > packing.bytes / bytes_of(packing.dtype)) {
    return bad_packing("\"", key, "\" does not lie in its ", packing.bytes, " bytes");
  }
  return absl::OkStatus();
}

// A group of one layer whose blocks are like this, and where in a block each of its fields begins.
struct Packed {
  KvGroup group;
  std::vector<uint64_t> starts;
};

absl::StatusOr<Packed> fields_of(const KvPacking& packing) {
  Packed out;
  out.group.block_tokens = packing.block_tokens;
  if (packing.whole.has_value()) {
    KvField& field = out.group.fields.emplace_back();
    field.role = KvRole::kOpaque;
    field.dtype = KvDtype::kByte;
    field.width = static_cast<uint32_t>(packing.bytes);
    field.per_block = true;
    field.element_stride = 1;
    field.head_stride = packing.bytes;
    field.order = *packing.whole;
    out.group.total_heads = out.group.heads = 1;
    out.starts = {0};
    return out;
  }
  out.group.heads = packing.heads;
  out.group.total_heads = packing.total_heads;
  out.group.first_head = packing.first_head;
  const uint64_t number = bytes_of(packing.dtype);
  for (const auto& [key, role, places] :
       {std::tuple("key", KvRole::kKey, &packing.key), {"value", KvRole::kValue, &packing.value}}) {
    if (places->heads.size() > 1) {
      return bad_packing("\"", key, "\" has \"heads\" of more than one level");
    }
    KvField& field = out.group.fields.emplace_back();
    field.role = role;
    field.dtype = packing.dtype;
    if (!places->heads.empty()) field.head_stride = places->heads.front().stride * number;
    if (absl::Status rows = fill_rows(*places, number, field); !rows.ok()) return rows;
    out.starts.push_back(places->start * number);
  }
  return out;
}

// --- found

absl::Status no_sum() {
  return bad_packing("the place of its numbers is not a sum of terms for token, head and element");
}

// The levels of an axis whose steps lie there; none: it has no such levels.
std::optional<KvPacking::Axis> levels_of(absl::Span<const int64_t> at) {
  KvPacking::Axis out;
  for (size_t inner = 1; inner < at.size(); inner *= out.back().count) {
    const int64_t stride = at[inner] - at[0];
    // As many as follow at this stride. Where they do not divide what is left, it is no sum.
    const size_t left = at.size() / inner;
    size_t count = 1;
    while (count < left && at[count * inner] - at[0] == static_cast<int64_t>(count) * stride) {
      ++count;
    }
    if (count == 1 || stride < 0) return std::nullopt;
    out.push_back({count, static_cast<uint64_t>(stride)});
  }
  const std::vector<uint64_t> steps = steps_of(out);
  for (size_t i = 0; i < at.size(); ++i) {
    if (static_cast<int64_t>(steps[i]) != at[i] - at[0]) return std::nullopt;
  }
  return out;
}

json said_of(const KvPacking::Places& places) {
  json out = {{"start", places.start}};
  for (const auto& [name, axis] : {std::pair("tokens", &places.tokens),
                                   {"heads", &places.heads},
                                   {"elements", &places.elements}}) {
    out[name] = json::array();
    for (const KvPacking::Level& level : *axis) out[name].push_back({level.count, level.stride});
  }
  return out;
}

}  // namespace

absl::StatusOr<KvPacking> read_packing(std::string_view packing) {
  const json said = json::parse(packing, nullptr, /*allow_exceptions=*/false);
  if (!said.is_object()) return bad_packing("it is not a JSON object");
  KvPacking out;
  const auto tokens = number_in(said, "block_tokens");
  const auto bytes = number_in(said, "bytes");
  if (!tokens || *tokens == 0 || !bytes || *bytes == 0) {
    return bad_packing("it must have \"block_tokens\" and \"bytes\"");
  }
  out.block_tokens = static_cast<uint32_t>(*tokens);
  out.bytes = *bytes;
  if (const auto whole = said.find("whole"); whole != said.end()) {
    if (!whole->is_string()) {
      return bad_packing("\"whole\" must be a string that says what the block holds");
    }
    out.whole = whole->get<std::string>();
    return out;
  }
  const auto heads = number_in(said, "heads");
  const auto size = number_in(said, "head_size");
  const auto dtype = dtype_in(said);
  if (!heads || !size || !dtype)
    return bad_packing("it must have \"heads\", \"head_size\" and a \"dtype\"");
  const auto total = said.contains("total_heads") ? number_in(said, "total_heads") : heads;
  const auto first = said.contains("first_head") ? number_in(said, "first_head") : 0;
  if (!total || !first) return bad_packing("\"total_heads\" and \"first_head\" must be numbers");
  out.heads = static_cast<uint32_t>(*heads);
  out.total_heads = static_cast<uint32_t>(*total);
  out.first_head = static_cast<uint32_t>(*first);
  out.head_size = static_cast<uint32_t>(*size);
  out.dtype = *dtype;
  absl::Status good = read_places(said, "key", out, out.key);
  if (good.ok()) good = read_places(said, "value", out, out.value);
  if (!good.ok()) return good;
  return out;
}

std::string write_packing(const KvPacking& packing) {
  json out = {{"block_tokens", packing.block_tokens}, {"bytes", packing.bytes}};
  if (packing.whole.has_value()) {
    out["whole"] = *packing.whole;
    return out.dump();
  }
  out.update({{"heads", packing.heads},
              {"head_size", packing.head_size},
              {"key", said_of(packing.key)},
              {"value", said_of(packing.value)}});
  for (const auto& [name, dtype] : kDtypes) {
    if (dtype == packing.dtype) out["dtype"] = name;
  }
  if (packing.total_heads != packing.heads || packing.first_head != 0) {
    out.update({{"total_heads", packing.total_heads}, {"first_head", packing.first_head}});
  }
  return out.dump();
}

std::vector<uint64_t> steps_of(const KvPacking::Axis& axis) {
  std::vector<uint64_t> places = {0};
  for (const KvPacking::Level& level : axis) {
    const size_t inner = places.size();
    for (uint64_t i = 1; i < level.count; ++i) {
      for (size_t j = 0; j < inner; ++j) places.push_back(places[j] + i * level.stride);
    }
  }
  return places;
}

absl::StatusOr<KvPlacement> place_packed(std::string_view packing, const KvGroup& group,
                                         absl::Span<const Descriptor> buffers,
                                         uint64_t block_stride, MemoryKind kind) {
  const absl::StatusOr<KvPacking> said = read_packing(packing);
  if (!said.ok()) return said.status();
  absl::StatusOr<Packed> packed = fields_of(*said);
  if (!packed.ok()) return packed.status();
  if (buffers.size() != group.layers.size()) {
    return bad_packing(buffers.size(), " buffers for ", group.layers.size(),
                       " layers: one for each");
  }
  KvGroup placed = std::move(packed->group);
  placed.layers = group.layers;
  placed.blocks = group.blocks;
  placed.window = group.window;
  std::vector<std::vector<uint64_t>> addresses;
  for (size_t f = 0; f < placed.fields.size(); ++f) {
    placed.fields[f].block_stride = block_stride == 0 ? said->bytes : block_stride;
    std::vector<uint64_t>& of_field = addresses.emplace_back();
    for (const Descriptor& layer : buffers) {
      of_field.push_back(layer.address + packed->starts[f]);
    }
  }
  const std::vector<absl::Span<const uint64_t>> spans(addresses.begin(), addresses.end());
  return KvPlacement::of_addresses(std::move(placed), spans, buffers, kind);
}

absl::StatusOr<std::string> find_packing(absl::Span<const int64_t> block, uint32_t tokens,
                                         uint32_t heads, uint32_t elements) {
  const uint64_t count = saturating_mul(saturating_mul(tokens, heads), elements);
  if (count == 0 || count > block.size() || block.size() > kMostPacked) {
    return bad_packing(block.size(), " places for K and V of ", tokens, " tokens, ", heads,
                       " heads and ", elements, " elements");
  }
  std::array<std::vector<int64_t>, 2> at;  // of K and V: where each number lies
  for (std::vector<int64_t>& half : at) half.assign(count, -1);
  for (size_t place = 0; place < block.size(); ++place) {
    const int64_t number = block[place];
    if (number == 0) continue;
    const uint64_t n =
        (number < 0 ? uint64_t{0} - static_cast<uint64_t>(number) : static_cast<uint64_t>(number)) -
        1;
    int64_t* const known = n < count ? &at[number < 0][n] : nullptr;
    if (known == nullptr || *known != -1) {
      return bad_packing("number ", number, " at place ", place, " should not be there");
    }
    *known = static_cast<int64_t>(place);
  }
  json out;
  for (const size_t half : {size_t{0}, size_t{1}}) {
    const std::vector<int64_t>& places = at[half];
    if (std::find(places.begin(), places.end(), -1) != places.end()) {
      return bad_packing("not all numbers of ", half == 0 ? "K" : "V", " are in it");
    }
    const auto axis = [&](size_t steps, size_t stride) {
      std::vector<int64_t> along(steps);
      for (size_t i = 0; i < steps; ++i) along[i] = places[i * stride];
      return along;
    };
    const size_t token = size_t{heads} * elements;
    const std::vector<int64_t> by_token = axis(tokens, token);
    const std::vector<int64_t> by_head = axis(heads, elements);
    const std::vector<int64_t> by_element = axis(elements, 1);
    for (size_t n = 0; n < count; ++n) {
      const int64_t sum = by_token[n / token] + by_head[n % token / elements] +
                          by_element[n % elements] - 2 * places[0];
      if (places[n] != sum) return no_sum();
    }
    const auto at_token = levels_of(by_token);
    const auto at_head = levels_of(by_head);
    const auto at_element = levels_of(by_element);
    if (!at_token || !at_head || !at_element) return no_sum();
    out[half == 0 ? "key" : "value"] =
        said_of({static_cast<uint64_t>(places[0]), *at_token, *at_head, *at_element});
  }
  return out.dump();
}

}  // namespace baton::kvtransfer
