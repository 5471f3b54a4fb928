// Requantising on the CPU: bf16 or fp32 rows to fp8 e4m3 with scales.
#include "kvtransfer/kv_requantise.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvtransfer/plans/fp8_rows.h"
#include "kvtransfer/plans/kv_boxes.h"
#include "transport/base/copies/fault_guard.h"

namespace baton::kvtransfer {
namespace {

constexpr float kLargest = 448;
constexpr uint8_t kNan = 0x7f;

KvRole scale_of(KvRole role) {
  return role == KvRole::kKey     ? KvRole::kKeyScale
         : role == KvRole::kValue ? KvRole::kValueScale
                                  : KvRole::kLatentScale;
}

bool is_value(KvRole role) {
  return role == KvRole::kKey || role == KvRole::kValue || role == KvRole::kLatent;
}

// No branches, so that a loop over it becomes vector code.
uint8_t e4m3_of(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7fffffff;
  const uint32_t capped = std::min(magnitude, std::bit_cast<uint32_t>(kLargest));
  // Normal: round the mantissa to 3 bits, move the exponent's bias from 127 to 7.
  const uint32_t rounded = capped + 0x7ffff + (capped >> 20 & 1);
  const uint32_t normal = (rounded >> 20) - (120u << 3);
  // Subnormal: multiples of 2^-9. Adding 2^14 rounds there: its last mantissa bit is 2^-9.
  const float shifted = std::bit_cast<float>(capped) + 16384.0f;
  const uint32_t subnormal = std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(16384.0f);
  constexpr uint32_t kSmallestNormal = 121u << 23;  // 2^-6
  uint32_t code = capped < kSmallestNormal ? subnormal : normal;
  code = magnitude >= 0x7f800000 ? kNan : code;
  return static_cast<uint8_t>(code | (bits >> 24 & 0x80));
}

absl::Status check_pair(const KvGroup& target, const KvField& from) {
  const KvField* to = find_role(target, from.role);
  const KvField* scale = find_role(target, scale_of(from.role));
  constexpr char kRemedy[] = "lay the target out with fp8 values and fp32 scales of the same heads";
  if (!is_value(from.role) || to == nullptr || scale == nullptr) {
    return kv_mismatch(name_of(from.role), "there",
                       to == nullptr ? "missing" : "without values and scales", kRemedy);
  }
  const bool types = (from.dtype == KvDtype::kBfloat16 || from.dtype == KvDtype::kFloat32) &&
                     to->dtype == KvDtype::kFloat8E4M3 && scale->dtype == KvDtype::kFloat32;
  const bool tiles = from.is_packed() || to->is_packed() || scale->is_packed();
  if (!types || tiles || from.per_block || to->per_block || scale->per_block) {
    return kv_mismatch(
        absl::StrCat("the type of ", name_of(from.role)), name_of(from.dtype), name_of(to->dtype),
        "only bf16 or fp32 to fp8 e4m3 with an fp32 scale for each token is offered");
  }
  if (from.width != to->width || from.width % scale->width != 0) {
    return kv_mismatch(absl::StrCat("the width of ", name_of(from.role)), absl::StrCat(from.width),
                       absl::StrCat(to->width, " with ", scale->width, " scales"), kRemedy);
  }
  return absl::OkStatus();
}

bool share_layers(const KvGroup& a, const KvGroup& b) {
  return std::find_first_of(a.layers.begin(), a.layers.end(), b.layers.begin(), b.layers.end()) !=
         a.layers.end();
}

// Every field of the source is converted, and every field of the target comes of one.
absl::Status check_groups(const KvGroup& from, const KvGroup& to) {
  for (const KvField& field : from.fields) {
    if (absl::Status status = check_pair(to, field); !status.ok()) return status;
  }
  for (const KvField& field : to.fields) {
    const bool made = std::any_of(from.fields.begin(), from.fields.end(), [&](const KvField& of) {
      return field.role == of.role || field.role == scale_of(of.role);
    });
    if (made) continue;
    return kv_mismatch(name_of(field.role), "missing", "there",
                       "lay both out with the same values; only those have scales");
  }
  return absl::OkStatus();
}

// Rows that a plan converts: tokens of one block on either side, times heads.
struct KvRowBox {
  // The place of the first token and head.
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  std::byte* scales = nullptr;
  size_t tokens = 0;
  size_t heads = 0;
  // Whose distances are those of the rows at the three places, and of their elements.
  const KvField* source = nullptr;
  const KvField* values = nullptr;
  const KvField* scale = nullptr;
};

// A box in rows that lie at equal distances.
void convert_box(const KvRowBox& box) {
  const KvField &field = *box.source, &value = *box.values, &scale = *box.scale;
  // Rows that lie next to each other follow each other: tokens of a head, or heads of a token.
  const bool by_tokens = box.heads == 1 || field.token_stride <= field.head_stride;
  // Where a token's last head lies before the next token's first, they are rows of one turn.
  const auto chains = [&](const KvField& x) { return x.token_stride == box.heads * x.head_stride; };
  const bool heads_chain = chains(field) && chains(value) && chains(scale);
  Fp8Rows rows = {.from = box.from,
                  .to = box.to,
                  .scales = box.scales,
                  .rows = by_tokens     ? box.tokens
                          : heads_chain ? box.tokens * box.heads
                                        : box.heads,
                  .from_step = by_tokens ? field.token_stride : field.head_stride,
                  .to_step = by_tokens ? value.token_stride : value.head_stride,
                  .scales_step = by_tokens ? scale.token_stride : scale.head_stride,
                  .from_element = field.element_stride,
                  .to_element = value.element_stride,
                  .scale_element = scale.element_stride,
                  .width = field.width,
                  .scales_of_row = scale.width,
                  .is_fp32 = field.dtype == KvDtype::kFloat32};
  for (size_t left = box.tokens * box.heads;; left -= rows.rows) {
    rows_to_fp8(rows);
    if (left == rows.rows) return;
    rows.from += by_tokens ? field.head_stride : field.token_stride;
    rows.to += by_tokens ? value.head_stride : value.token_stride;
    rows.scales += by_tokens ? scale.head_stride : scale.token_stride;
  }
}

float decode_e4m3(uint8_t code) {
  const int exponent = code >> 3 & 15;
  const int mantissa = code & 7;
  float value = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                              : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  if ((code & 0x7f) == kNan) value = std::numeric_limits<float>::quiet_NaN();
  return (code & 0x80) != 0 ? -value : value;
}

}  // namespace

uint8_t fp8_e4m3_of(float value) { return e4m3_of(value); }

float float_of_fp8_e4m3(uint8_t code) {
  static const std::array<float, 256> values = [] {
    std::array<float, 256> all{};
    for (int i = 0; i < 256; ++i) all[i] = decode_e4m3(static_cast<uint8_t>(i));
    return all;
  }();
  return values[code];
}

absl::StatusOr<KvRequantisePlan> KvRequantisePlan::make(const KvLayout& source,
                                                        const KvLayout& target,
                                                        const KvShare& share) {
  if (absl::Status status = source.check(); !status.ok()) return status;
  if (absl::Status status = target.check(); !status.ok()) return status;
  for (const KvGroup& from : source.groups) {
    for (const KvGroup& to : target.groups) {
      if (!share_layers(from, to)) continue;
      if (absl::Status status = check_groups(from, to); !status.ok()) return status;
    }
  }
  // Everything else that a plan checks: the same with fields of one type.
  KvLayout plain_source = source;
  KvLayout plain_target = target;
  const auto keep_values = [](KvLayout& layout) {
    for (KvGroup& group : layout.groups) {
      std::erase_if(group.fields, [](const KvField& field) { return !is_value(field.role); });
      for (KvField& field : group.fields) field.dtype = KvDtype::kByte;
    }
  };
  keep_values(plain_source);
  keep_values(plain_target);
  absl::StatusOr<KvPlan> plan = KvPlan::make(plain_source, plain_target, share);
  if (!plan.ok()) return plan.status();
  KvRequantisePlan out;
  out.parts_.assign(plan->parts().begin(), plan->parts().end());
  for (KvPart& part : out.parts_) part.boxes.clear();
  out.complete_ = plan->complete();
  out.source_ = source;
  out.target_ = target;
  return out;
}

absl::Status KvRequantisePlan::run(size_t part_number, KvTokens tokens, const KvPages& source,
                                   const KvPages& target, absl::Span<const std::byte* const> from,
                                   absl::Span<std::byte* const> to, KvTokens layers) const {
  if (part_number >= parts_.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("part ", part_number, " of a plan that has ", parts_.size()));
  }
  if (from.size() != source_.buffers.size() || to.size() != target_.buffers.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(from.size(), " and ", to.size(), " buffers for layouts that have ",
                     source_.buffers.size(), " and ", target_.buffers.size()));
  }
  const KvPart& part = parts_[part_number];
  layers.end = std::min<uint64_t>(layers.end, part.layers.size());
  if (tokens.empty() || layers.empty() || part.heads.empty()) return absl::OkStatus();
  const KvGroup& from_group = source_.groups[part.source_group];
  const KvGroup& to_group = target_.groups[part.target_group];
  for (const auto& [group, pages, side] :
       {std::tuple(&from_group, &source, "source"), std::tuple(&to_group, &target, "target")}) {
    if (absl::Status status = check_kv_pages(side, *group, *pages, tokens); !status.ok()) {
      return status;
    }
  }
  // As numbers: a buffer of which only a part is here may begin outside of all memory.
  const auto locate = [](const std::byte* buffer, const KvGroup& group, const KvField& field,
                         const KvPages& pages, const KvPlace& place, uint64_t token,
                         uint32_t head) {
    const uint64_t block = pages.pages[token / group.block_tokens - pages.first_block];
    return reinterpret_cast<std::byte*>(reinterpret_cast<uintptr_t>(buffer) + place.offset +
                                        block * field.block_stride +
                                        token % group.block_tokens * field.token_stride +
                                        (head - group.first_head) * field.head_stride);
  };
  for (const KvField& field : from_group.fields) {
    const KvField& values = *find_role(to_group, field.role);
    const KvField& scale = *find_role(to_group, scale_of(field.role));
    KvRowBox box{.heads = part.heads.end - part.heads.first,
                 .source = &field,
                 .values = &values,
                 .scale = &scale};
    for (uint64_t layer = layers.begin; layer < layers.end; ++layer) {
      const KvPlace& at = field.places[part.layers[layer].source_index];
      const KvPlace& value_at = values.places[part.layers[layer].target_index];
      const KvPlace& scale_at = scale.places[part.layers[layer].target_index];
      const uint32_t head = part.heads.first;
      // In turns of tokens that lie in one block on either side.
      for (uint64_t token = tokens.begin, next; token < tokens.end; token = next) {
        next =
            std::min({tokens.end, token + from_group.block_tokens - token % from_group.block_tokens,
                      token + to_group.block_tokens - token % to_group.block_tokens});
        box.from = locate(from[at.buffer], from_group, field, source, at, token, head);
        box.to = locate(to[value_at.buffer], to_group, values, target, value_at, token, head);
        box.scales = locate(to[scale_at.buffer], to_group, scale, target, scale_at, token, head);
        box.tokens = next - token;
        if (base::guarded([&box] { convert_box(box); })) continue;
        return absl::FailedPreconditionError(
            "memory of a requantised cache is no longer mapped, or was never mapped for writing: "
            "keep memory mapped until it is deregistered");
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace baton::kvtransfer
