// The fake's copies of many pieces: planes and batches, whose pieces move in any order.
#include <algorithm>
#include <cstring>

#include "absl/strings/str_format.h"
#include "tests/gpudirect/fake/fake_driver.h"

namespace baton::gpudirect {

// More descriptors than this have crashed drivers.
constexpr size_t kMostDescriptors = 1024;

void FakeDriver::execute(std::vector<Copy> copies) {
  std::shuffle(copies.begin(), copies.end(), random_);
  for (const Copy& copy : copies)
    execute(Operation{.to = copy.to, .from = copy.from, .bytes = copy.bytes});
}

struct FakeCopyCalls {
  using Needs = FakeCall::Needs;
  using Copy = FakeDriver::Copy;

  static bool reachable(const FakeCall& call, DevicePointer at, size_t bytes) {
    return call.fake.view_of(at, bytes) != nullptr || call.fake.pinned(at, bytes);
  }
  // Whether two of them write the same bytes.
  static bool overlap(std::vector<Copy> copies) {
    std::sort(copies.begin(), copies.end(),
              [](const Copy& a, const Copy& b) { return a.to < b.to; });
    for (size_t i = 1; i < copies.size(); ++i) {
      if (copies[i - 1].to + copies[i - 1].bytes > copies[i].to) return true;
    }
    return false;
  }

  static Result queue(const FakeCall& call, Stream stream, std::vector<Copy> copies) {
    const auto on = call.fake.streams_.find(stream);
    if (on == call.fake.streams_.end()) {
      call.violate(stream == nullptr ? "on the legacy stream" : "no such stream");
      return kInvalidHandle;
    }
    for (const Copy& copy : copies) {
      if (copy.bytes == 0 || !reachable(call, copy.to, copy.bytes) ||
          !reachable(call, copy.from, copy.bytes)) {
        call.violate(absl::StrFormat("%u bytes from %#x to %#x: not all of them are reachable",
                                     copy.bytes, copy.from, copy.to));
        return kInvalidValue;
      }
    }
    if (overlap(copies)) call.violate("two of the pieces write the same bytes");
    on->second.push_back({.number = call.fake.next_operation_++, .copies = std::move(copies)});
    return kSuccess;
  }

  static Result plane(const PlaneCopy* plane, Stream stream) {
    const FakeCall call("cuMemcpy2DAsync", Needs::kContext);
    if (call.refused() != kSuccess) return call.refused();
    for (const PlaneSide* side : {&plane->from, &plane->to}) {
      if (side->memory_type != kMemoryTypeUnified || side->x != 0 || side->y != 0 ||
          side->pitch < plane->width) {
        call.violate("rows overlap, or a side is described as we never do");
        return kInvalidValue;
      }
    }
    std::vector<Copy> copies;
    for (size_t row = 0; row < plane->height; ++row) {
      copies.push_back({plane->to.device + row * plane->to.pitch,
                        plane->from.device + row * plane->from.pitch, plane->width});
    }
    return queue(call, stream, std::move(copies));
  }

  static Result batch(DevicePointer* to, DevicePointer* from, size_t* bytes, size_t count,
                      BatchAttributes* attributes, size_t* first_of_attributes,
                      size_t attribute_count, Stream stream) {
    const FakeCall call("cuMemcpyBatchAsync", Needs::kContext);
    if (call.refused() != kSuccess) return call.refused();
    if (count == 0 || count > kMostDescriptors) {
      call.violate(absl::StrFormat("%u descriptors", count));
    }
    for (size_t i = 0; i < attribute_count; ++i) {
      const bool rises = i == 0 ? first_of_attributes[0] == 0
                                : first_of_attributes[i] > first_of_attributes[i - 1];
      if (!rises || first_of_attributes[i] >= count) call.violate("attributes' indices");
      if (attributes[i].source_order != kSourceInStreamOrder) {
        call.violate("the sources are not read in the stream's order");
      }
    }
    std::vector<Copy> copies;
    for (size_t i = 0; i < count; ++i) copies.push_back({to[i], from[i], bytes[i]});
    return queue(call, stream, std::move(copies));
  }
};

void add_fake_copy_calls(FakeEntries& out) {
  out["cuMemcpy2DAsync"] = {reinterpret_cast<void*>(FakeCopyCalls::plane), 3020};
  out["cuMemcpyBatchAsync"] = {reinterpret_cast<void*>(FakeCopyCalls::batch), 13000};
}

}  // namespace baton::gpudirect
