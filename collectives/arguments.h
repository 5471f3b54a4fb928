// What is said of arguments that make no sense.
#pragma once

#include <cstddef>
#include <string_view>

#include "absl/status/status.h"
#include "collectives/types.h"

namespace baton::collectives {

// InvalidArgument: "all_reduce: why".
absl::Status refuse(Collective collective, std::string_view why);

// Refuses a null or misaligned pointer to `count` elements of `element` bytes; none: anything goes.
absl::Status check_pointer(Collective collective, const char* name, const void* pointer,
                           size_t count, size_t element);

}  // namespace baton::collectives
