// Characters of UTF-8, and text as Abseil has it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "absl/strings/string_view.h"

namespace baton::engine {

// view(): a std::string_view as Abseil's own string_view type, which Debian's Abseil is built with
// and its string functions take.
inline absl::string_view view(std::string_view text) { return {text.data(), text.size()}; }

// Decodes one character at `text[at]`, at < text.size(). Bytes that are not UTF-8 count as one
// character each that is neither letter, number nor space.
struct Character {
  uint32_t code = 0;
  size_t bytes = 1;
  bool valid = true;
};
Character decode_character(std::string_view text, size_t at);

}  // namespace baton::engine
