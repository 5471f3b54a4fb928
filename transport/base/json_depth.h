// How deep JSON from outside may be nested: parsers and printers that recurse have a stack.
#pragma once

#include <string_view>

namespace baton::base {

inline constexpr int kMaxJsonDepth = 64;

// Without parsing it; text in quotes does not count.
inline bool json_too_deep(std::string_view text) {
  int depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') {
        ++i;
      } else if (c == '"') {
        in_string = false;
      }
    } else if (c == '"') {
      in_string = true;
    } else if (c == '{' || c == '[') {
      if (++depth > kMaxJsonDepth) return true;
    } else if (c == '}' || c == ']') {
      --depth;
    }
  }
  return false;
}

}  // namespace baton::base
