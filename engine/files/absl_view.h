// view(): a std::string_view as Abseil's own string_view type, which Debian's Abseil is built with
// and its string functions take.
#pragma once

#include <string_view>

#include "absl/strings/string_view.h"

namespace baton::engine {

inline absl::string_view view(std::string_view text) { return {text.data(), text.size()}; }

}  // namespace baton::engine
