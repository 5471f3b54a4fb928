// Layouts of other engines' blocks: read, written and checked. Nothing in them is trusted.
#include "engine/handoff/foreign_layout.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/files/json_fields.h"
#include "engine/kernels/aligned.h"

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

namespace {

using kvtransfer::KvDtype;
using kvtransfer::KvPacking;

// Where the keys or the values of a block lie: number (head h, token t, element e) is at start +
// heads[h] + tokens[t] + elements[e].
struct Steps {
  explicit Steps(const KvPacking::Places& places)
      : start(places.start),
        heads(steps_of(places.heads)),
        tokens(steps_of(places.tokens)),
        elements(steps_of(places.elements)) {}
  uint64_t start;
  std::vector<uint64_t> heads, tokens, elements;
};

template <KvDtype kDtype>
uint16_t load(const std::byte* block, size_t at) {
  if constexpr (kDtype == KvDtype::kBfloat16) {
    uint16_t bits = 0;
    std::memcpy(&bits, block + 2 * at, 2);
    return bits;
  } else {
    float value = 0;
    std::memcpy(&value, block + 4 * at, 4);
    return bf16_from_float(value);
  }
}

template <KvDtype kDtype>
void store(std::byte* block, size_t at, uint16_t bits) {
  if constexpr (kDtype == KvDtype::kBfloat16) {
    std::memcpy(block + 2 * at, &bits, 2);
  } else {
    const float value = float_from_bf16(bits);
    std::memcpy(block + 4 * at, &value, 4);
  }
}

// Calls move(own number, place in the foreign block) for all that `tokens` and block `number`
// share.
template <typename Move>
void for_each_number(const ForeignLayout& layout, size_t number, const KvCache& cache, int layer,
                     const OwnTokens& tokens, Move move) {
  const size_t first = number * layout.block_tokens;
  const size_t begin = std::max(tokens.begin, first);
  const size_t end = std::min(tokens.end, first + layout.block_tokens);
  const auto size = static_cast<size_t>(cache.geometry().head_dim);
  const Steps keys(layout.key), values(layout.value);
  const uint32_t own_end = tokens.first_head + static_cast<uint32_t>(cache.geometry().kv_heads);
  const uint32_t first_head = std::max(layout.first_head, tokens.first_head);
  const uint32_t end_head = std::min(layout.held().end, own_end);
  for (size_t token = begin; token < end; ++token) {
    const uint32_t block = tokens.blocks[token / kBlockTokens - tokens.first_block];
    const size_t slot = token % kBlockTokens;
    for (uint32_t head = first_head; head < end_head; ++head) {
      const auto own = static_cast<int>(head - tokens.first_head);
      const uint32_t its = head - layout.first_head;
      uint16_t* key = cache.key(layer, block, own) + slot;
      uint16_t* value = cache.value(layer, block, own) + slot * size;
      const size_t key_at = keys.start + keys.heads[its] + keys.tokens[token - first];
      const size_t value_at = values.start + values.heads[its] + values.tokens[token - first];
      for (size_t i = 0; i < size; ++i) {
        move(key[i * kBlockTokens], key_at + keys.elements[i]);
        move(value[i], value_at + values.elements[i]);
      }
    }
  }
}

template <KvDtype kDtype>
void read_as(const ForeignLayout& layout, const std::byte* foreign, size_t number,
             const KvCache& cache, int layer, const OwnTokens& tokens) {
  for_each_number(layout, number, cache, layer, tokens,
                  [&](uint16_t& own, size_t at) { own = load<kDtype>(foreign, at); });
}

template <KvDtype kDtype>
void write_as(const ForeignLayout& layout, std::byte* foreign, size_t number, const KvCache& cache,
              int layer, const OwnTokens& tokens) {
  for_each_number(layout, number, cache, layer, tokens,
                  [&](const uint16_t& own, size_t at) { store<kDtype>(foreign, at, own); });
}

}  // namespace

void read_block(const ForeignLayout& layout, const std::byte* foreign, size_t number,
                const KvCache& cache, int layer, const OwnTokens& tokens) {
  const auto read =
      layout.dtype == KvDtype::kBfloat16 ? read_as<KvDtype::kBfloat16> : read_as<KvDtype::kFloat32>;
  read(layout, foreign, number, cache, layer, tokens);
}

void write_block(const ForeignLayout& layout, std::byte* foreign, size_t number,
                 const KvCache& cache, int layer, const OwnTokens& tokens) {
  const size_t first = number * layout.block_tokens;
  const bool whole = tokens.begin <= first && tokens.end >= first + layout.block_tokens;
  const size_t numbers = size_t{2} * layout.heads * layout.block_tokens * layout.head_size;
  if (!whole || numbers * bytes_of(layout.dtype) != layout.bytes) {
    std::memset(foreign, 0, layout.bytes);
  }
  const auto write = layout.dtype == KvDtype::kBfloat16 ? write_as<KvDtype::kBfloat16>
                                                        : write_as<KvDtype::kFloat32>;
  write(layout, foreign, number, cache, layer, tokens);
}

}  // namespace baton::engine::handoff
