// Which caches a kernel converts, and its rows in three dimensions.
#include "kvtransfer/internal/agent_kv/device_rows.h"

#include <cstdint>

#include "absl/strings/str_format.h"

namespace baton::kvtransfer {

std::string on_another_side(std::string_view why) {
  return absl::StrFormat(
      "%s; make the plan on the side whose cache is host memory, or requantise on the device and "
      "make a plan of equal types",
      why);
}

absl::StatusOr<MemoryPlace> place_of(absl::Span<const KvLocalBuffer> buffers) {
  const MemoryPlace place = buffers.empty() ? MemoryPlace{} : buffers[0].region.place;
  for (const KvLocalBuffer& buffer : buffers) {
    if (buffer.region.place == place) continue;
    return absl::UnimplementedError(
        on_another_side(absl::StrFormat("requantising needs the whole cache in one place, but one "
                                        "buffer is memory of %s and another of %s",
                                        place.name(), buffer.region.place.name())));
  }
  return place;
}

absl::Status check_device_rows(const KvLayout& layout, absl::Span<const KvLocalBuffer> buffers) {
  for (size_t g = 0; g < layout.groups.size(); ++g) {
    for (const KvField& field : layout.groups[g].fields) {
      const uint64_t element = bytes_of(field.dtype);
      bool aligned = true;
      for (const uint64_t stride :
           {field.element_stride, field.token_stride, field.head_stride, field.block_stride}) {
        aligned = aligned && stride % element == 0;
      }
      for (const KvPlace& place : field.places) {
        const KvLocalBuffer& buffer = buffers[place.buffer];
        const auto address = reinterpret_cast<uintptr_t>(buffer.region.base) + buffer.offset;
        aligned = aligned && (address + place.offset) % element == 0;
      }
      if (aligned && field.element_stride <= UINT32_MAX) continue;
      return absl::UnimplementedError(on_another_side(
          absl::StrFormat("a requantising kernel needs numbers aligned to their size, at most 4 "
                          "GiB apart; %s of group %u does not qualify",
                          name_of(field.role), g)));
    }
  }
  return absl::OkStatus();
}

absl::Status still_on_device(absl::Span<const KvLocalBuffer> buffers, const MemoryPlace& place) {
  const MemoryRegion* last = nullptr;  // layers lie in one, often
  for (const KvLocalBuffer& buffer : buffers) {
    const MemoryRegion& region = buffer.region;
    if (last != nullptr && last->index == region.index) continue;
    last = &region;
    const auto now = internal::device_memory()->place(region.base, region.size);
    if (!now.ok()) return now.status();
    if (*now == place) continue;
    return absl::InvalidArgumentError(absl::StrFormat(
        "%u bytes at %p are no longer memory of %s: deregister memory before freeing it",
        region.size, region.base, place.name()));
  }
  return absl::OkStatus();
}

internal::RowBox device_rows(const KvRowBox& box) {
  const KvField &from = *box.source, &to = *box.values, &scale = *box.scale;
  // Rows that follow each other are those that lie close to each other at the source.
  const bool by_tokens = from.token_stride <= from.head_stride;
  const auto strides = [&](const KvField& field) -> std::array<int64_t, 3> {
    const auto token = static_cast<int64_t>(field.token_stride);
    const auto head = static_cast<int64_t>(field.head_stride);
    return {0, by_tokens ? head : token, by_tokens ? token : head};
  };
  const auto tokens = static_cast<uint32_t>(box.tokens), heads = static_cast<uint32_t>(box.heads);
  return {.form = {.elements = from.width,
                   .span = from.width / scale.width,
                   .is_fp32 = from.dtype == KvDtype::kFloat32,
                   .from_element = static_cast<uint32_t>(from.element_stride),
                   .to_element = static_cast<uint32_t>(to.element_stride),
                   .scale_element = static_cast<uint32_t>(scale.element_stride)},
          .from = box.from,
          .to = box.to,
          .scales = box.scales,
          .count = {1, by_tokens ? heads : tokens, by_tokens ? tokens : heads},
          .from_stride = strides(from),
          .to_stride = strides(to),
          .scale_stride = strides(scale)};
}

}  // namespace baton::kvtransfer
