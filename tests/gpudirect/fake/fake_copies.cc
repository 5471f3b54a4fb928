// The fake's copies of many pieces: planes and batches of pieces, whose pieces move in
// any order.
#include <algorithm>
#include <cstring>

#include "absl/strings/str_format.h"
#include "tests/gpudirect/fake/entries.h"

namespace baton::gpudirect {

// More descriptors than this have crashed drivers.
constexpr size_t kMostDescriptors = 1024;

void FakeDriver::execute(std::vector<Copy> copies) {
  std::shuffle(copies.begin(), copies.end(), random_);
  for (const Copy& copy : copies) {
    if (copy.early == nullptr) {
      execute(Operation{.to = copy.to, .from = copy.from, .bytes = copy.bytes});
    } else if (std::byte* const to = reach(copy.to, copy.bytes); to != nullptr) {
      std::memcpy(to, copy.early->data(), copy.bytes);
    }
  }
}

struct FakeCopyCalls {
  using Copy = FakeDriver::Copy;

  static bool reachable(const FakeCall& call, DevicePointer at, size_t bytes) {
    return call.fake.reach(at, bytes) != nullptr;
  }
  // Of one that goes to or from the host: nothing else of the engine's comes between its pieces.
  static void note_size(const FakeCall& call, const std::vector<Copy>& copies) {
    size_t bytes = 0;
    for (const Copy& copy : copies) {
      const bool on_device = call.fake.view_of(copy.to, copy.bytes) != nullptr &&
                             call.fake.view_of(copy.from, copy.bytes) != nullptr;
      bytes += on_device ? 0 : copy.bytes;
    }
    call.fake.largest_copy_ = std::max(call.fake.largest_copy_, bytes);
  }
  // Whether two of them write the same bytes, or one writes what another reads: they move in any
  // order.
  static const char* overlap(std::vector<Copy> copies) {
    std::sort(copies.begin(), copies.end(),
              [](const Copy& a, const Copy& b) { return a.to < b.to; });
    for (size_t i = 1; i < copies.size(); ++i) {
      if (copies[i - 1].to + copies[i - 1].bytes > copies[i].to) {
        return "two of the pieces write the same bytes";
      }
    }
    for (const Copy& copy : copies) {
      auto after =
          std::lower_bound(copies.begin(), copies.end(), copy.from + copy.bytes,
                           [](const Copy& other, DevicePointer at) { return other.to < at; });
      if (after == copies.begin()) continue;
      if (--after; after->to + after->bytes > copy.from) return "a piece writes what one reads";
    }
    return nullptr;
  }

  static Result put(const FakeCall& call, Stream stream, std::vector<Copy> copies) {
    auto* const queue = call.queue(stream);
    if (queue == nullptr) return kInvalidHandle;
    for (const Copy& copy : copies) {
      if (copy.bytes == 0 || !reachable(call, copy.to, copy.bytes) ||
          !reachable(call, copy.from, copy.bytes)) {
        call.violate(Rule::kCopy,
                     absl::StrFormat("%u bytes from %#x to %#x: not all of them are reachable",
                                     copy.bytes, copy.from, copy.to));
        return kInvalidValue;
      }
    }
    note_size(call, copies);
    if (const char* wrong = overlap(copies)) call.violate(Rule::kCopy, wrong);
    queue->push_back({.number = call.fake.next_operation_++, .copies = std::move(copies)});
    return kSuccess;
  }

  static Result plane(const FakeCall& call, const PlaneCopy* plane, Stream stream) {
    for (const PlaneSide* side : {&plane->from, &plane->to}) {
      if (side->memory_type != kMemoryTypeUnified || side->x != 0 || side->y != 0 ||
          side->pitch < plane->width) {
        call.violate(Rule::kCopy, "rows overlap, or a side is described as we never do");
        return kInvalidValue;
      }
    }
    std::vector<Copy> copies;
    for (size_t row = 0; row < plane->height; ++row) {
      copies.push_back({plane->to.device + row * plane->to.pitch,
                        plane->from.device + row * plane->from.pitch, plane->width});
    }
    return put(call, stream, std::move(copies));
  }

  static Result batch(const FakeCall& call, DevicePointer* to, DevicePointer* from, size_t* bytes,
                      size_t count, BatchAttributes* attributes, size_t* first_of_attributes,
                      size_t attribute_count, Stream stream) {
    if (count == 0 || count > kMostDescriptors) {
      call.violate(Rule::kCopy, absl::StrFormat("%u descriptors", count));
    }
    std::vector<Copy> copies;
    for (size_t i = 0; i < count; ++i) copies.push_back({to[i], from[i], bytes[i]});
    for (size_t i = 0; i < attribute_count; ++i) {
      const bool rises = i == 0 ? first_of_attributes[0] == 0
                                : first_of_attributes[i] > first_of_attributes[i - 1];
      if (!rises || first_of_attributes[i] >= count)
        call.violate(Rule::kCopy, "attributes' indices");
      const size_t first = std::min(first_of_attributes[i], count);
      if (!ordered(call, attributes[i].source_order, absl::MakeSpan(copies).subspan(first))) {
        return kInvalidValue;
      }
    }
    return put(call, stream, std::move(copies));
  }

  // Whether there is such an order at all. In any but the stream's the sources may be read at once,
  // before the stream has written them.
  static bool ordered(const FakeCall& call, int order, absl::Span<Copy> copies) {
    if (order == kSourceInStreamOrder) return true;
    call.violate(Rule::kCopy, "the sources are not read in the stream's order");
    if (order == 0) return false;
    for (Copy& copy : copies) {
      if (const std::byte* const from_now = call.fake.reach(copy.from, copy.bytes)) {
        copy.early = std::make_shared<const std::string>(reinterpret_cast<const char*>(from_now),
                                                         copy.bytes);
      }
    }
    return true;
  }
};

void add_fake_copy_calls(FakeEntries& out) {
  add_call<FakeCopyCalls::plane, "cuMemcpy2DAsync", kContext>(out, 3020);
  add_call<FakeCopyCalls::batch, "cuMemcpyBatchAsync", kContext>(out, 13000);
}

}  // namespace baton::gpudirect
