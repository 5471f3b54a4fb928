// The boxes of a plan: one for each field, then joined as far as both layouts allow.
#include "kvtransfer/plans/kv_boxes.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace baton::kvtransfer {
namespace {

constexpr char kSameEngine[] = "run the same release with the same KV data type on both workers";

absl::Status check_fields(const KvGroup& source, const KvGroup& target) {
  for (const auto& [one, other, is_source] :
       {std::tuple(&source, &target, true), std::tuple(&target, &source, false)}) {
    for (const KvField& field : one->fields) {
      if (find_role(*other, field.role) != nullptr) continue;
      return kv_mismatch(name_of(field.role), is_source ? "there" : "missing",
                         is_source ? "missing" : "there", kSameEngine);
    }
  }
  for (const KvField& from : source.fields) {
    const KvField& to = *find_role(target, from.role);
    if (from.dtype != to.dtype) {
      return kv_mismatch(absl::StrCat("the type of ", name_of(from.role)), name_of(from.dtype),
                         name_of(to.dtype),
                         "use the same KV data type on both workers, or convert at the source");
    }
    if (from.row_tokens != to.row_tokens || from.runs != to.runs || from.order != to.order) {
      const auto packed = [](const KvField& field) {
        if (field.role == KvRole::kOpaque) return absl::StrCat("\"", field.order, "\"");
        return field.is_packed()
                   ? absl::StrCat("packed as \"", field.order, "\" in ", field.row_tokens,
                                  " tokens and ", field.runs, " runs")
                   : std::string("in the rows of a token");
      };
      return kv_mismatch(
          name_of(from.role), packed(from), packed(to),
          "only the kernels know this order: run the same release on processors of one "
          "kind, with the same KV data type and head size");
    }
    if (from.width != to.width) {
      return kv_mismatch(from.role == KvRole::kOpaque
                             ? "the size of a head in a block, in bytes"
                             : absl::StrCat("the width of ", name_of(from.role)),
                         absl::StrCat(from.width), absl::StrCat(to.width), kSameEngine);
    }
    if (from.per_block != to.per_block) {
      return kv_mismatch(name_of(from.role), from.per_block ? "one per block" : "one per token",
                         to.per_block ? "one per block" : "one per token", kSameEngine);
    }
    if (from.per_block && source.block_tokens != target.block_tokens) {
      return kv_mismatch("the number of tokens in a block", absl::StrCat(source.block_tokens),
                         absl::StrCat(target.block_tokens),
                         absl::StrCat("give both workers the same block size: ", name_of(from.role),
                                      " exists once per block and cannot be split"));
    }
  }
  return absl::OkStatus();
}

// A box that is still being put together.
struct Draft {
  KvBox box;
  uint64_t piece = 0;
};

Draft draft_of(const KvGroup& source, const KvGroup& target, const KvPart& part,
               uint32_t from_index, uint32_t to_index) {
  const KvField& from = source.fields[from_index];
  const KvField& to = target.fields[to_index];
  const uint64_t heads = part.heads.end - part.heads.first;
  Draft draft;
  KvBox& box = draft.box;
  box.source_field = from_index;
  box.target_field = to_index;
  box.source_offset = (part.heads.first - source.first_head) * from.head_stride;
  box.target_offset = (part.heads.first - target.first_head) * to.head_stride;
  box.bytes_per_token = heads * from.token_bytes();
  draft.piece = bytes_of(from.dtype);
  box.dims = {{heads, from.head_stride, to.head_stride}};
  if (from.runs == 1) {
    box.dims.push_back({from.width, from.element_stride, to.element_stride});
  } else {
    draft.piece *= from.width;
    box.dims.push_back({from.runs, from.run_stride, to.run_stride});
  }
  if (!from.per_block) {
    const uint64_t rows = part.unit / from.row_tokens;  // equal at both ends, and divides both
    box.source_unit_stride = rows * from.token_stride;
    box.target_unit_stride = rows * to.token_stride;
    box.dims.push_back({rows, from.token_stride, to.token_stride});
  }
  coalesce(box.dims, draft.piece);
  return draft;
}

// Whether `next` lies directly behind `first`, in every layer and block, at both ends.
bool follows(const KvGroup& source, const KvGroup& target, const KvPart& part, const Draft& first,
             const Draft& next) {
  const KvBox& a = first.box;
  const KvBox& b = next.box;
  if (a.dims != b.dims) return false;
  const KvField& from_a = source.fields[a.source_field];
  const KvField& from_b = source.fields[b.source_field];
  const KvField& to_a = target.fields[a.target_field];
  const KvField& to_b = target.fields[b.target_field];
  if (from_a.block_stride != from_b.block_stride || to_a.block_stride != to_b.block_stride) {
    return false;
  }
  // Where a block is one unit, no copy steps from unit to unit.
  if (source.block_tokens != part.unit && a.source_unit_stride != b.source_unit_stride)
    return false;
  if (target.block_tokens != part.unit && a.target_unit_stride != b.target_unit_stride)
    return false;
  return std::all_of(part.layers.begin(), part.layers.end(), [&](const KvPart::Layer& layer) {
    const KvPlace& pa = from_a.places[layer.source_index];
    const KvPlace& pb = from_b.places[layer.source_index];
    const KvPlace& ta = to_a.places[layer.target_index];
    const KvPlace& tb = to_b.places[layer.target_index];
    return pa.buffer == pb.buffer && ta.buffer == tb.buffer &&
           pa.offset + a.source_offset + first.piece == pb.offset + b.source_offset &&
           ta.offset + a.target_offset + first.piece == tb.offset + b.target_offset;
  });
}

bool steps_are_equal(const KvField& field, const std::vector<KvPart::Layer>& layers, bool source) {
  const auto place = [&](size_t i) -> const KvPlace& {
    return field.places[source ? layers[i].source_index : layers[i].target_index];
  };
  for (size_t i = 1; i < layers.size(); ++i) {
    if (place(i).buffer != place(0).buffer || place(i).offset < place(i - 1).offset ||
        place(i).offset - place(i - 1).offset != place(1).offset - place(0).offset) {
      return false;
    }
  }
  return true;
}

}  // namespace

absl::Status kv_mismatch(absl::string_view what, absl::string_view source, absl::string_view target,
                         absl::string_view remedy) {
  return absl::FailedPreconditionError(absl::StrCat("KV layouts do not match: ", what, " is ",
                                                    source, " at the source (prefill) and ", target,
                                                    " at the target (decode); ", remedy));
}

void coalesce(KvBoxDims& dims, uint64_t& piece_bytes) {
  dims.erase(
      std::remove_if(dims.begin(), dims.end(), [](const KvBoxDim& dim) { return dim.count == 1; }),
      dims.end());
  for (bool joined = true; joined;) {
    joined = false;
    for (size_t i = 0; i < dims.size(); ++i) {
      if (dims[i].source_stride != piece_bytes || dims[i].target_stride != piece_bytes) continue;
      piece_bytes *= dims[i].count;
      dims.erase(dims.begin() + static_cast<std::ptrdiff_t>(i));
      joined = true;
      break;
    }
  }
  std::sort(dims.begin(), dims.end(),
            [](const KvBoxDim& a, const KvBoxDim& b) { return a.target_stride > b.target_stride; });
  // Two dimensions that step on evenly at both ends are one.
  for (size_t i = 0; i + 1 < dims.size();) {
    KvBoxDim& outer = dims[i];
    const KvBoxDim& inner = dims[i + 1];
    if (outer.source_stride == inner.source_stride * inner.count &&
        outer.target_stride == inner.target_stride * inner.count) {
      outer = {outer.count * inner.count, inner.source_stride, inner.target_stride};
      dims.erase(dims.begin() + static_cast<std::ptrdiff_t>(i) + 1);
    } else {
      ++i;
    }
  }
}

const KvField* find_role(const KvGroup& group, KvRole role) {
  for (const KvField& field : group.fields) {
    if (field.role == role) return &field;
  }
  return nullptr;
}

absl::Status make_boxes(const KvLayout& source_layout, const KvLayout& target_layout,
                        KvPart& part) {
  const KvGroup& source = source_layout.groups[part.source_group];
  const KvGroup& target = target_layout.groups[part.target_group];
  if (absl::Status status = check_fields(source, target); !status.ok()) return status;
  if (part.heads.empty()) return absl::OkStatus();
  std::vector<Draft> drafts;
  for (uint32_t to = 0; to < target.fields.size(); ++to) {
    for (uint32_t from = 0; from < source.fields.size(); ++from) {
      if (source.fields[from].role != target.fields[to].role) continue;
      drafts.push_back(draft_of(source, target, part, from, to));
    }
  }
  for (size_t a = 0; a < drafts.size();) {
    const auto next = std::find_if(drafts.begin(), drafts.end(), [&](const Draft& b) {
      return &b != &drafts[a] && follows(source, target, part, drafts[a], b);
    });
    if (next == drafts.end()) {
      ++a;
      continue;
    }
    drafts[a].piece += next->piece;
    drafts[a].box.bytes_per_token += next->box.bytes_per_token;
    coalesce(drafts[a].box.dims, drafts[a].piece);
    drafts.erase(next);
    a = 0;
  }
  for (Draft& draft : drafts) {
    draft.box.piece_bytes = draft.piece;
    draft.box.same_layer_steps =
        part.layers.size() > 1 &&
        steps_are_equal(source.fields[draft.box.source_field], part.layers, true) &&
        steps_are_equal(target.fields[draft.box.target_field], part.layers, false);
    part.boxes.push_back(std::move(draft.box));
  }
  return absl::OkStatus();
}

}  // namespace baton::kvtransfer
