// A plan's rows as a kernel of a device takes them (transport/internal/device_memory.h).
#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvtransfer/kv_layout.h"
#include "kvtransfer/kv_requantise.h"
#include "kvtransfer/plans/kv_sides.h"
#include "transport/internal/device_memory.h"
#include "transport/region.h"

namespace baton::kvtransfer {

// Where a cache lies. Unimplemented, with the remedy, where that is not one place.
absl::StatusOr<MemoryPlace> place_of(absl::Span<const KvLocalBuffer> buffers);
// Whether a kernel can convert rows of a cache, or into it. Unimplemented, with the remedy.
absl::Status check_device_rows(const KvLayout& layout, absl::Span<const KvLocalBuffer> buffers);
// Whether what was registered as memory of a device is so still: a kernel at memory that is gone
// would lose the device to the whole process, where a copy would only fail. About a microsecond for
// each range that is registered.
absl::Status still_on_device(absl::Span<const KvLocalBuffer> buffers, const MemoryPlace& place);
internal::RowBox device_rows(const KvRowBox& box);
// The word of a plan that cannot be made where the cache is.
std::string on_another_side(std::string_view why);

}  // namespace baton::kvtransfer
