// What is said of arguments that make no sense.
#include "collectives/arguments.h"

#include <cstdint>
#include <string>

#include "absl/strings/str_format.h"

namespace baton::collectives {

absl::Status refuse(Collective collective, std::string_view why) {
  return absl::InvalidArgumentError(
      absl::StrFormat("%s: %s", std::string(name_of(collective)), std::string(why)));
}

absl::Status check_pointer(Collective collective, const char* name, const void* pointer,
                           size_t count, size_t element) {
  if (count == 0) return absl::OkStatus();
  if (pointer == nullptr) return refuse(collective, absl::StrFormat("%s is null", name));
  if (reinterpret_cast<uintptr_t>(pointer) % element != 0) {
    return refuse(collective, absl::StrFormat("%s (%p) is not aligned to its elements of %u bytes",
                                              name, pointer, element));
  }
  return absl::OkStatus();
}

}  // namespace baton::collectives
