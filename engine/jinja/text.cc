// Python's string methods by code points; cases and classes of characters by ICU.
#include "engine/jinja/text.h"

#include <unicode/locid.h>
#include <unicode/uchar.h>
#include <unicode/unistr.h>

#include <algorithm>

#include "absl/strings/str_format.h"
#include "engine/files/utf8.h"

namespace baton::engine::jinja {
namespace {

icu::UnicodeString unicode(std::string_view text) {
  return icu::UnicodeString::fromUTF8({text.data(), static_cast<int32_t>(text.size())});
}

std::string utf8(const icu::UnicodeString& text) {
  std::string out;
  text.toUTF8String(out);
  return out;
}

// One character as the first of a word.
std::string title_of(char32_t c) {
  icu::UnicodeString one(static_cast<UChar32>(c));
  one.toTitle(
      nullptr, icu::Locale::getRoot(),
      U_TITLECASE_NO_LOWERCASE | U_TITLECASE_NO_BREAK_ADJUSTMENT | U_TITLECASE_WHOLE_STRING);
  return utf8(one);
}

std::string of(char32_t c) { return narrow(std::u32string_view(&c, 1)); }
bool is_lower(char32_t c) { return u_isULowercase(static_cast<UChar32>(c)) != 0; }
bool is_upper(char32_t c) { return u_isUUppercase(static_cast<UChar32>(c)) != 0; }
bool is_title(char32_t c) { return u_charType(static_cast<UChar32>(c)) == U_TITLECASE_LETTER; }
bool is_cased(char32_t c) { return is_lower(c) || is_upper(c) || is_title(c); }
bool is_alpha(char32_t c) { return (U_GET_GC_MASK(static_cast<UChar32>(c)) & U_GC_L_MASK) != 0; }
int numeric(char32_t c) {
  return u_getIntPropertyValue(static_cast<UChar32>(c), UCHAR_NUMERIC_TYPE);
}
bool is_decimal(char32_t c) { return numeric(c) == U_NT_DECIMAL; }
bool is_digit_character(char32_t c) { return is_decimal(c) || numeric(c) == U_NT_DIGIT; }
bool is_numeric(char32_t c) { return numeric(c) != U_NT_NONE; }
bool is_line_end(char32_t c) {
  return (c >= 0x0a && c <= 0x0d) || (c >= 0x1c && c <= 0x1e) || c == 0x85 || c == 0x2028 ||
         c == 0x2029;
}

template <typename Predicate>
bool all(std::u32string_view text, Predicate is) {
  return !text.empty() && std::all_of(text.begin(), text.end(), is);
}

// islower() and isupper(): something is cased, and nothing otherwise.
bool cased_as(std::u32string_view text, bool (*right)(char32_t)) {
  bool found = false;
  for (const char32_t c : text) {
    if (is_cased(c) && !right(c)) return false;
    found |= right(c);
  }
  return found;
}

bool is_titled(std::u32string_view text) {
  bool found = false, inside = false;
  for (const char32_t c : text) {
    if (is_upper(c) || is_title(c) ? inside : is_lower(c) && !inside) return false;
    inside = is_cased(c);
    found |= inside;
  }
  return found;
}

}  // namespace

std::u32string wide(std::string_view text) {
  std::u32string out;
  out.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    const Character c = decode_character(text, at);
    out += c.valid ? static_cast<char32_t>(c.code) : U'\xfffd';
    at += c.bytes;
  }
  return out;
}

std::string narrow(std::u32string_view text) {
  std::string out;
  out.reserve(text.size());
  for (const char32_t c : text) {
    if (c < 0x80) {
      out += static_cast<char>(c);
    } else if (c < 0x800) {
      out += {static_cast<char>(0xc0 | (c >> 6)), static_cast<char>(0x80 | (c & 0x3f))};
    } else if (c < 0x10000) {
      out += {static_cast<char>(0xe0 | (c >> 12)), static_cast<char>(0x80 | ((c >> 6) & 0x3f)),
              static_cast<char>(0x80 | (c & 0x3f))};
    } else {
      out += {static_cast<char>(0xf0 | (c >> 18)), static_cast<char>(0x80 | ((c >> 12) & 0x3f)),
              static_cast<char>(0x80 | ((c >> 6) & 0x3f)), static_cast<char>(0x80 | (c & 0x3f))};
    }
  }
  return out;
}

int64_t count_characters(std::string_view text) {
  return std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; });
}

bool is_space(char32_t c) {
  if (c < 0x80) return (c >= 0x09 && c <= 0x0d) || (c >= 0x1c && c <= 0x20);
  return c == 0x85 || c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 ||
         c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}

bool is_printable(char32_t c) {
  return c == ' ' || (U_GET_GC_MASK(static_cast<UChar32>(c)) & (U_GC_C_MASK | U_GC_Z_MASK)) == 0;
}

bool is_word(char32_t c) { return c == '_' || is_alpha(c) || is_numeric(c); }

std::string strip(std::string_view text, const std::string* characters, bool left, bool right) {
  const std::u32string all = wide(text);
  const std::u32string set = characters != nullptr ? wide(*characters) : std::u32string();
  const auto goes = [&](char32_t c) {
    return characters == nullptr ? is_space(c) : set.find(c) != std::u32string::npos;
  };
  size_t begin = 0, end = all.size();
  while (left && begin < end && goes(all[begin])) ++begin;
  while (right && end > begin && goes(all[end - 1])) --end;
  return narrow(std::u32string_view(all).substr(begin, end - begin));
}

std::vector<std::string> split_lines(std::string_view text, bool keep_ends) {
  const std::u32string all = wide(text);
  std::vector<std::string> lines;
  for (size_t begin = 0; begin < all.size();) {
    size_t end = begin;
    while (end < all.size() && !is_line_end(all[end])) ++end;
    size_t next = std::min(end + 1, all.size());
    if (next < all.size() && all[end] == '\r' && all[next] == '\n') ++next;
    lines.push_back(
        narrow(std::u32string_view(all).substr(begin, (keep_ends ? next : end) - begin)));
    begin = next;
  }
  return lines;
}

std::vector<std::string> split(std::string_view text, const std::string* separator, int64_t most,
                               bool from_right) {
  std::vector<std::string> pieces;
  const auto may = [&] { return most < 0 || static_cast<int64_t>(pieces.size()) < most; };
  if (separator != nullptr) {
    while (may()) {
      const size_t at = from_right ? text.rfind(*separator) : text.find(*separator);
      if (at == std::string_view::npos) break;
      const std::string_view before = text.substr(0, at),
                             behind = text.substr(at + separator->size());
      pieces.emplace_back(from_right ? behind : before);
      text = from_right ? before : behind;
    }
    pieces.emplace_back(text);
  } else {
    std::u32string all = wide(text);
    if (from_right) std::reverse(all.begin(), all.end());
    size_t at = 0;
    const auto skip = [&](bool spaces) {
      while (at < all.size() && is_space(all[at]) == spaces) ++at;
    };
    const auto add = [&](size_t begin, size_t end) {
      std::u32string piece = all.substr(begin, end - begin);
      if (from_right) std::reverse(piece.begin(), piece.end());
      pieces.push_back(narrow(piece));
    };
    for (skip(true); at < all.size(); skip(true)) {
      const size_t begin = at;
      if (!may()) {
        add(begin, all.size());
        break;
      }
      skip(false);
      add(begin, at);
    }
  }
  if (from_right) std::reverse(pieces.begin(), pieces.end());
  return pieces;
}

std::string replace(std::string_view text, std::string_view from, std::string_view to,
                    int64_t most) {
  std::string out;
  if (from.empty()) {  // before each character and at the end
    for (size_t at = 0;;) {
      if (most != 0) out.append(to);
      most -= most > 0 ? 1 : 0;
      if (at >= text.size()) return out;
      const size_t bytes = decode_character(text, at).bytes;
      out.append(text.substr(at, bytes));
      at += bytes;
    }
  }
  for (size_t at = text.find(from); at != std::string_view::npos && most != 0;
       at = text.find(from)) {
    out.append(text.substr(0, at)).append(to);
    text.remove_prefix(at + from.size());
    most -= most > 0 ? 1 : 0;
  }
  return out.append(text);
}

std::string upper(std::string_view text) {
  return utf8(unicode(text).toUpper(icu::Locale::getRoot()));
}
std::string lower(std::string_view text) {
  return utf8(unicode(text).toLower(icu::Locale::getRoot()));
}
std::string casefold(std::string_view text) {
  return utf8(unicode(text).foldCase(U_FOLD_CASE_DEFAULT));
}

std::string capitalize(std::string_view text) {
  if (text.empty()) return "";
  const Character first = decode_character(text, 0);
  // Small letters depend on what is before them: all of the text is made small, and its first
  // letter replaced.
  return title_of(static_cast<char32_t>(first.code)) +
         lower(text).substr(lower(text.substr(0, first.bytes)).size());
}

std::string title(std::string_view text) {
  std::string out;
  const std::u32string all = wide(text);
  // Each letter's small form as its place asks for (a final sigma), piece by piece.
  for (size_t at = 0; at < all.size();) {
    if (!is_cased(all[at])) {
      out += of(all[at++]);
      continue;
    }
    size_t end = at;
    while (end < all.size() && is_cased(all[end])) ++end;
    out += capitalize(narrow(std::u32string_view(all).substr(at, end - at)));
    at = end;
  }
  return out;
}

std::string swapcase(std::string_view text) {
  std::string out;
  for (const char32_t c : wide(text)) {
    out += is_upper(c) ? lower(of(c)) : is_lower(c) ? upper(of(c)) : of(c);
  }
  return out;
}

std::optional<bool> ask(std::string_view name, std::string_view text) {
  const std::u32string all_of_it = wide(text);
  if (name == "islower") return cased_as(all_of_it, is_lower);
  if (name == "isupper") return cased_as(all_of_it, is_upper);
  if (name == "istitle") return is_titled(all_of_it);
  if (name == "isalpha") return all(all_of_it, is_alpha);
  if (name == "isdigit") return all(all_of_it, is_digit_character);
  if (name == "isdecimal") return all(all_of_it, is_decimal);
  if (name == "isnumeric") return all(all_of_it, is_numeric);
  if (name == "isalnum")
    return all(all_of_it, [](char32_t c) { return is_alpha(c) || is_numeric(c); });
  if (name == "isspace") return all(all_of_it, is_space);
  if (name == "isprintable") return all_of_it.empty() || all(all_of_it, is_printable);
  if (name == "isascii")
    return all_of_it.empty() || all(all_of_it, [](char32_t c) { return c < 0x80; });
  return std::nullopt;
}

std::string repr_of(std::string_view text) {
  const bool single =
      text.find('\'') != std::string_view::npos && text.find('"') == std::string_view::npos;
  const char quote = single ? '"' : '\'';
  std::string out(1, quote);
  for (const char32_t c : wide(text)) {
    if (c == static_cast<char32_t>(quote) || c == '\\') {
      out += {'\\', static_cast<char>(c)};
    } else if (c == '\n' || c == '\r' || c == '\t') {
      out += c == '\n' ? "\\n" : c == '\r' ? "\\r" : "\\t";
    } else if (is_printable(c)) {
      out += of(c);
    } else {
      const auto code = static_cast<uint32_t>(c);
      out += code < 0x100     ? absl::StrFormat("\\x%02x", code)
             : code < 0x10000 ? absl::StrFormat("\\u%04x", code)
                              : absl::StrFormat("\\U%08x", code);
    }
  }
  return out + quote;
}

std::string escape_html(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '\'':
        out += "&#39;";
        break;
      case '"':
        out += "&#34;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

std::string pad(std::string_view text, int64_t width, char32_t fill, char where) {
  const int64_t missing = width - count_characters(text);
  if (missing <= 0) return std::string(text);
  int64_t left = where == '>' || where == '=' || where == 'z' ? missing : 0;
  if (where == '^') left = missing / 2;
  if (where == 'c') left = missing / 2 + (missing & width & 1);  // str.center()
  std::string before, behind;
  for (int64_t i = 0; i < missing; ++i) (i < left ? before : behind) += of(fill);
  const bool signs = where == '=' || where == 'z';
  const bool sign = signs && (text.starts_with('-') || text.starts_with('+') ||
                              (where == '=' && text.starts_with(' ')));
  return std::string(text.substr(0, sign ? 1 : 0)) + before +
         std::string(text.substr(sign ? 1 : 0)) + behind;
}

}  // namespace baton::engine::jinja
