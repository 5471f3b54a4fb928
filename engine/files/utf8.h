// Characters of UTF-8.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace baton::engine {

// Decodes one character at `text[at]`, at < text.size(). Bytes that are not UTF-8 count as one
// character each that is neither letter, number nor space.
struct Character {
  uint32_t code = 0;
  size_t bytes = 1;
  bool valid = true;
};
Character decode_character(std::string_view text, size_t at);

}  // namespace baton::engine
