// Looks code points up in the Unicode tables.
#include "engine/tokenizer/unicode_classes.h"

#include <algorithm>
#include <iterator>

#include "engine/tokenizer/unicode_tables.h"

namespace baton::engine {
namespace {

template <size_t kCount>
bool contains(const UnicodeRange (&ranges)[kCount], uint32_t code) {
  const UnicodeRange* it =
      std::upper_bound(std::begin(ranges), std::end(ranges), code,
                       [](uint32_t c, const UnicodeRange& range) { return c < range.first; });
  return it != std::begin(ranges) && code <= std::prev(it)->last;
}

}  // namespace

bool is_letter(uint32_t code) {
  if (code < 0x80) return (code | 0x20) - 'a' < 26u;
  return contains(kLetters, code);
}

bool is_number(uint32_t code) {
  if (code < 0x80) return code - '0' < 10u;
  return contains(kNumbers, code);
}

bool is_space(uint32_t code) {
  return (code >= 9 && code <= 13) || code == 0x20 || code == 0x85 || code == 0xa0 ||
         code == 0x1680 || (code >= 0x2000 && code <= 0x200a) || code == 0x2028 || code == 0x2029 ||
         code == 0x202f || code == 0x205f || code == 0x3000;
}

}  // namespace baton::engine
