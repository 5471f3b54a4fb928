// A cache of fp8 with scales, as tests that requantise lay it out.
#pragma once

#include "kvtransfer/kv_layout.h"

namespace baton::kvtransfer {

// K and V in fp8 with a scale for each `span` elements; values and scales in buffers of their own.
inline KvLayout fp8_layout(const KvShape& shape, KvLayout::Order order, uint32_t scales) {
  KvShape values = shape;
  values.dtype = KvDtype::kFloat8E4M3;
  KvLayout layout = KvLayout::paged(values, order, KvLayout::Pair::kInBlock, false);
  KvShape scale = shape;
  scale.head_size = scales;
  scale.dtype = KvDtype::kFloat32;
  KvLayout extra = KvLayout::paged(scale, order, KvLayout::Pair::kSplit, false);
  for (KvField& field : extra.groups[0].fields) {
    field.role = field.role == KvRole::kKey ? KvRole::kKeyScale : KvRole::kValueScale;
    for (KvPlace& place : field.places) ++place.buffer;
    layout.groups[0].fields.push_back(field);
  }
  layout.fit_buffers();
  return layout;
}

}  // namespace baton::kvtransfer
