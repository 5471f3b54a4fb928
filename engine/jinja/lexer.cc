// Cutting a template into tokens, rule by rule as jinja2/lexer.py does.
#include "engine/jinja/lexer.h"

#include <unicode/uchar.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>

#include "absl/strings/ascii.h"
#include "absl/strings/str_format.h"
#include "engine/files/utf8.h"
#include "engine/jinja/text.h"

namespace baton::engine::jinja {
namespace {

// The longest first.
constexpr std::array<std::string_view, 25> kOperators = {
    "//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[",
    "]",  "(",  ")",  "{",  "}",  ">",  "<", "=", ".", ":", "|", ","};

bool is_name_byte(char c) { return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '_'; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }

class Lexer {
 public:
  explicit Lexer(std::string_view source) {
    source_ = replace(replace(source, "\r\n", "\n", -1), "\r", "\n", -1);
    if (source_.ends_with('\n')) source_.pop_back();
  }

  std::vector<Token> run() {
    while (at_ < source_.size()) root();
    add(TokenKind::kEnd, "");
    return std::move(tokens_);
  }

 private:
  [[noreturn]] void fail(std::string_view what) const {
    throw Error(absl::StrFormat("line %d: %s", line_, what));
  }

  bool here(std::string_view text) const {
    return std::string_view(source_).substr(at_).starts_with(text);
  }

  void add(TokenKind kind, std::string text, Value number = {}) {
    tokens_.push_back({kind, std::move(text), std::move(number), line_});
  }

  void go(size_t to) {
    line_ += static_cast<int>(std::count(source_.begin() + static_cast<long>(at_),
                                         source_.begin() + static_cast<long>(to), '\n'));
    at_ = to;
  }

  // Behind the spaces that begin at `at`.
  size_t behind_spaces(size_t at) const {
    while (at < source_.size()) {
      const Character c = decode_character(source_, at);
      if (!c.valid || !is_space(static_cast<char32_t>(c.code))) break;
      at += c.bytes;
    }
    return at;
  }

  // Behind `tag` at `at`, which may have a sign before it that says what happens to the white space
  // behind it; nothing where it does not stand there.
  std::optional<size_t> end_of(size_t at, std::string_view tag, bool trims, bool plus) const {
    const std::string_view rest = std::string_view(source_).substr(std::min(at, source_.size()));
    if (rest.starts_with('-') && rest.substr(1).starts_with(tag))
      return behind_spaces(at + 1 + tag.size());
    if (plus && rest.starts_with('+') && rest.substr(1).starts_with(tag))
      return at + 1 + tag.size();
    if (!rest.starts_with(tag)) return std::nullopt;
    const size_t end = at + tag.size();
    return trims && end < source_.size() && source_[end] == '\n' ? end + 1 : end;
  }

  // Behind "{%- raw -%}" or "{% endraw %}" at `at`.
  std::optional<size_t> raw_tag(size_t at, std::string_view name, bool ends) const {
    const std::string_view all = source_;
    if (!all.substr(at).starts_with("{%")) return std::nullopt;
    at += 2;
    if (at < all.size() && (all[at] == '-' || all[at] == '+')) ++at;
    at = behind_spaces(at);
    if (!all.substr(at).starts_with(name)) return std::nullopt;
    return end_of(behind_spaces(at + name.size()), "%}", ends, ends);
  }

  // Text before a tag with this sign: "-" strips it; without "+", lstrip_blocks takes the spaces of
  // the tag's line.
  void data(size_t end, char sign, bool variable) {
    std::string text = source_.substr(at_, end - at_);
    if (sign == '-') {
      text = strip(text, nullptr, false, true);
    } else if (sign != '+' && !variable) {
      const size_t line = text.rfind('\n') == std::string::npos ? 0 : text.rfind('\n') + 1;
      const std::string indentation = text.substr(line);
      if ((line > 0 || line_starts_) && strip(indentation, nullptr, true, false).empty())
        text.resize(line);
    }
    if (!text.empty()) add(TokenKind::kData, text);
    go(end);
  }

  char sign_at(size_t at) const {
    return at < source_.size() && (source_[at] == '-' || source_[at] == '+') ? source_[at] : '\0';
  }

  // Text up to the next tag, and the tag.
  void root() {
    size_t tag = at_;
    while (true) {
      tag = source_.find('{', tag);
      if (tag == std::string::npos) {
        add(TokenKind::kData, source_.substr(at_));
        go(source_.size());
        return;
      }
      const char kind = tag + 1 < source_.size() ? source_[tag + 1] : '\0';
      if (kind == '%' || kind == '{' || kind == '#') break;
      ++tag;
    }
    const char kind = source_[tag + 1], sign = sign_at(tag + 2);
    data(tag, sign, kind == '{');
    if (const auto raw = kind == '%' ? raw_tag(tag, "raw", false) : std::nullopt) {
      set_behind(*raw);
      raw_text();
      return;
    }
    set_behind(tag + 2 + (sign != '\0' ? 1 : 0));
    if (kind == '#') {
      comment();
    } else {
      const bool block = kind == '%';
      add(block ? TokenKind::kBlockBegin : TokenKind::kVariableBegin, "");
      expression(block);
    }
  }

  void set_behind(size_t to) {
    go(to);
    line_starts_ = to > 0 && source_[to - 1] == '\n';
  }

  void comment() {
    for (size_t at = at_; at < source_.size(); ++at) {
      if (const auto end = end_of(at, "#}", true, true)) return set_behind(*end);
    }
    fail("Missing end of comment tag");
  }

  void raw_text() {
    for (size_t at = source_.find("{%", at_); at != std::string::npos;
         at = source_.find("{%", at + 1)) {
      if (const auto end = raw_tag(at, "endraw", true)) {
        data(at, sign_at(at + 2), false);
        return set_behind(*end);
      }
    }
    fail("Missing end of raw directive");
  }

  void expression(bool block) {
    std::string open;  // what closes the brackets that are open
    while (true) {
      if (open.empty()) {
        if (const auto end = end_of(at_, block ? "%}" : "}}", block, block)) {
          add(block ? TokenKind::kBlockEnd : TokenKind::kVariableEnd, "");
          return set_behind(*end);
        }
      }
      if (at_ >= source_.size()) fail("Unexpected end of template");
      if (const size_t end = behind_spaces(at_); end > at_) {
        go(end);
      } else if (is_digit(source_[at_])) {
        number();
      } else if (is_name_byte(source_[at_])) {
        size_t last = at_;
        while (last < source_.size() && is_name_byte(source_[last])) ++last;
        if (last < source_.size() && static_cast<unsigned char>(source_[last]) >= 0x80) {
          fail("names beyond ASCII are not supported");
        }
        add(TokenKind::kName, source_.substr(at_, last - at_));
        go(last);
      } else if (source_[at_] == '\'' || source_[at_] == '"') {
        string();
      } else {
        symbol(open);
      }
    }
  }

  void symbol(std::string& open) {
    for (const std::string_view one : kOperators) {
      if (!here(one)) continue;
      if (one == "(" || one == "[" || one == "{") open += one == "(" ? ')' : one == "[" ? ']' : '}';
      if (one == ")" || one == "]" || one == "}") {
        if (open.empty() || open.back() != one[0]) fail(concat("unexpected '", one, "'"));
        open.pop_back();
      }
      add(TokenKind::kOperator, std::string(one));
      return go(at_ + one.size());
    }
    fail(concat("unexpected character \"",
                source_.substr(at_, decode_character(source_, at_).bytes), "\""));
  }

  // Digits, each of which may have one underscore before it but for the first.
  size_t digits(size_t at) const {
    const auto digit = [&](size_t i) { return i < source_.size() && is_digit(source_[i]); };
    if (!digit(at)) return at;
    while (digit(at) || (source_[at] == '_' && digit(at + 1))) {
      if (++at >= source_.size()) break;
    }
    return at;
  }

  void number() {
    const auto char_at = [&](size_t i) { return i < source_.size() ? source_[i] : '\0'; };
    size_t end = digits(at_);
    const bool behind_dot = at_ > 0 && source_[at_ - 1] == '.';
    bool fraction = false;
    if (!behind_dot) {
      if (char_at(end) == '.' && digits(end + 1) > end + 1) {
        end = digits(end + 1);
        fraction = true;
      }
      if (char_at(end) == 'e' || char_at(end) == 'E') {
        const size_t from = end + (char_at(end + 1) == '+' || char_at(end + 1) == '-' ? 2 : 1);
        if (digits(from) > from) {
          end = digits(from);
          fraction = true;
        }
      }
    }
    if (fraction) {
      const std::string text = replace(source_.substr(at_, end - at_), "_", "", -1);
      double value = 0;
      std::from_chars(text.data(), text.data() + text.size(), value);
      add(TokenKind::kNumber, "", Value(value));
      return go(end);
    }
    int base = 10;
    size_t from = at_;
    const char mark = absl::ascii_tolower(static_cast<unsigned char>(char_at(at_ + 1)));
    if (source_[at_] == '0' && (mark == 'b' || mark == 'o' || mark == 'x')) {
      const int other = mark == 'b' ? 2 : mark == 'o' ? 8 : 16;
      const auto fits = [&](char c) {
        const int digit = is_digit(c)                                           ? c - '0'
                          : absl::ascii_isxdigit(static_cast<unsigned char>(c)) ? 10
                                                                                : 99;
        return digit < other;
      };
      size_t last = at_ + 2;
      while (fits(char_at(last)) || (char_at(last) == '_' && fits(char_at(last + 1)))) ++last;
      if (last > at_ + 2) {
        base = other;
        from = at_ + 2;
        end = last;
      }
    }
    if (base == 10 && source_[at_] == '0') {  // "007" are two numbers
      end = at_ + 1;
      while (char_at(end) == '0' || (char_at(end) == '_' && char_at(end + 1) == '0')) ++end;
    }
    const std::string text = replace(source_.substr(from, end - from), "_", "", -1);
    int64_t value = 0;
    if (std::from_chars(text.data(), text.data() + text.size(), value, base).ec != std::errc()) {
      fail("integers beyond 64 bits are not supported");
    }
    add(TokenKind::kNumber, "", Value(value));
    go(end);
  }

  void string() {
    const char quote = source_[at_];
    size_t end = at_ + 1;
    while (end < source_.size() && source_[end] != quote) end += source_[end] == '\\' ? 2 : 1;
    if (end >= source_.size()) fail("a string has no end");
    add(TokenKind::kString, unescape(std::string_view(source_).substr(at_ + 1, end - at_ - 1)));
    go(end + 1);
  }

  // Python's "unicode-escape".
  std::string unescape(std::string_view text) const {
    std::string out;
    for (size_t at = 0; at < text.size();) {
      if (text[at] != '\\') {
        out += text[at++];
        continue;
      }
      const char c = text[at + 1];
      at += 2;
      constexpr std::string_view kFrom = "\\'\"abfnrtv", kTo = "\\'\"\a\b\f\n\r\t\v";
      if (const size_t known = kFrom.find(c); known != std::string_view::npos) {
        out += kTo[known];
      } else if (c == '\n') {
        continue;
      } else if (c >= '0' && c <= '7') {
        size_t end = at;
        while (end < text.size() && end < at + 2 && text[end] >= '0' && text[end] <= '7') ++end;
        append_code(out, text.substr(at - 1, end - at + 1), 8);
        at = end;
      } else if (c == 'x' || c == 'u' || c == 'U') {
        const size_t count = c == 'x' ? 2 : c == 'u' ? 4 : 8;
        const std::string_view hex = text.substr(at, count);
        if (hex.size() < count || !std::all_of(hex.begin(), hex.end(), [](unsigned char h) {
              return absl::ascii_isxdigit(h);
            })) {
          fail(absl::StrFormat("truncated \\%c escape", c));
        }
        append_code(out, hex, 16);
        at += count;
      } else if (c == 'N') {
        const size_t end = text.find('}', at);
        const std::string name(end != std::string_view::npos && text[at] == '{'
                                   ? text.substr(at + 1, end - at - 1)
                                   : "");
        UErrorCode error = U_ZERO_ERROR;
        const UChar32 code = u_charFromName(U_UNICODE_CHAR_NAME, name.c_str(), &error);
        if (name.empty() || U_FAILURE(error)) fail("unknown Unicode character name");
        const auto character = static_cast<char32_t>(code);
        out += narrow(std::u32string_view(&character, 1));
        at = end + 1;
      } else {
        out += '\\';
        if (static_cast<unsigned char>(c) < 0x80) {
          out += c;
          continue;
        }
        // Jinja2 writes a character beyond ASCII as an escape first; the backslash before it spoils
        // that.
        const Character wide = decode_character(text, at - 1);
        out += wide.code < 0x100     ? absl::StrFormat("x%02x", wide.code)
               : wide.code < 0x10000 ? absl::StrFormat("u%04x", wide.code)
                                     : absl::StrFormat("U%08x", wide.code);
        at += wide.bytes - 1;
      }
    }
    return out;
  }

  void append_code(std::string& out, std::string_view digits_of, int base) const {
    uint32_t code = 0;
    std::from_chars(digits_of.data(), digits_of.data() + digits_of.size(), code, base);
    if (code > 0x10ffff) fail("illegal Unicode character");
    if (code >= 0xd800 && code < 0xe000) fail("half of a surrogate pair is no character");
    const auto character = static_cast<char32_t>(code);
    out += narrow(std::u32string_view(&character, 1));
  }

  std::string source_;
  size_t at_ = 0;
  int line_ = 1;
  bool line_starts_ = true;
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> tokenize(std::string_view source) { return Lexer(source).run(); }

}  // namespace baton::engine::jinja
