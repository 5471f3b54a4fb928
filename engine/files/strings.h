// Debian's Abseil has its own string_view type; its string functions need this conversion.
#pragma once

#include <string_view>

#include "absl/strings/string_view.h"

namespace baton::engine {

inline absl::string_view view(std::string_view text) { return {text.data(), text.size()}; }

}  // namespace baton::engine
