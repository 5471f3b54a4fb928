// "%d of %s" % (1, 2), and "{} of {name}".format(1, name=2).
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "absl/strings/ascii.h"
#include "engine/jinja/operations.h"
#include "engine/jinja/text.h"

namespace baton::engine::jinja {
namespace {

constexpr int64_t kWidest = 1 << 20;

struct Style {
  char32_t fill = ' ';
  char align = '\0', sign = '-', type = '\0', group = '\0';
  bool alternate = false, zero = false;
  int64_t width = 0, precision = -1;
};

std::string digits_of(uint64_t number, int base, bool capital) {
  std::string out;
  do {
    out +=
        (capital ? "0123456789ABCDEF" : "0123456789abcdef")[number % static_cast<unsigned>(base)];
    number /= static_cast<unsigned>(base);
  } while (number > 0);
  std::reverse(out.begin(), out.end());
  return out;
}

std::string sign_of(bool negative, char sign) {
  return negative ? "-" : sign == '+' ? "+" : sign == ' ' ? " " : "";
}

void group_digits(std::string& digits, char mark, size_t each) {
  for (size_t at = digits.size(); at > each; at -= each) digits.insert(at - each, 1, mark);
}

std::string integer_text(int64_t number, const Style& style) {
  const char type = absl::ascii_tolower(static_cast<unsigned char>(style.type));
  const int base = type == 'x' ? 16 : type == 'o' ? 8 : type == 'b' ? 2 : 10;
  const uint64_t size =
      number < 0 ? 0 - static_cast<uint64_t>(number) : static_cast<uint64_t>(number);
  std::string digits = digits_of(size, base, style.type == 'X');
  if (style.precision > static_cast<int64_t>(digits.size())) {
    digits.insert(0, static_cast<size_t>(style.precision) - digits.size(), '0');
  }
  if (style.group != '\0') group_digits(digits, style.group, base == 10 ? 3 : 4);
  const std::string mark =
      style.alternate && base != 10 ? concat("0", std::string(1, style.type)) : "";
  return concat(sign_of(number < 0, style.sign), mark, digits);
}

std::string float_text(double number, const Style& style) {
  char type = style.type == '%' ? 'f' : style.type;
  if (std::isnan(number) || std::isinf(number)) {
    std::string text = std::isnan(number) ? "nan" : "inf";
    if (absl::ascii_isupper(static_cast<unsigned char>(type))) text = absl::AsciiStrToUpper(text);
    return sign_of(std::signbit(number) && !std::isnan(number), style.sign) + text +
           (style.type == '%' ? "%" : "");
  }
  const double size = std::fabs(style.type == '%' ? number * 100 : number);
  std::string text;
  if (type == '\0') {
    if (style.precision >= 0)
      throw Error("a float is formatted with a precision and no type: this is not supported");
    text = float_repr(size);
  } else {
    const std::string format = concat("%", style.alternate ? "#" : "", ".*", std::string(1, type));
    char buffer[1500];
    std::snprintf(
        buffer, sizeof buffer, format.c_str(),
        static_cast<int>(style.precision < 0 ? 6 : std::min<int64_t>(style.precision, 1000)), size);
    text = buffer;
  }
  if (style.group != '\0') {
    const size_t whole = std::min(text.find_first_not_of("0123456789"), text.size());
    std::string digits = text.substr(0, whole);
    group_digits(digits, style.group, 3);
    text = digits + text.substr(whole);
  }
  return sign_of(std::signbit(number), style.sign) + text + (style.type == '%' ? "%" : "");
}

std::string placed(const std::string& text, const Style& style, char fallback) {
  if (style.width > kWidest) throw Error("a width is too large");
  return pad(text, style.width, style.fill, style.align != '\0' ? style.align : fallback);
}

// One conversion of a %-format.
class Percent {
 public:
  Percent(const std::string& text, const Value& args)
      : text_(text), args_(args), left_(args.is_tuple() ? *args.sequence() : Values{args}) {}

  std::string run() {
    std::string out;
    while (at_ < text_.size()) {
      const size_t next = std::min(text_.find('%', at_), text_.size());
      out += text_.substr(at_, next - at_);
      at_ = next + 1;
      if (next < text_.size()) out += conversion();
    }
    const bool mapping = !args_.is_tuple() && !args_.is_string() &&
                         (args_.is_undefined() || args_.is_list() || args_.dict() != nullptr);
    if (used_ < left_.size() && !mapping)
      throw Error("not all arguments converted during string formatting");
    return out;
  }

 private:
  char here() const {
    if (at_ >= text_.size()) throw Error("incomplete format");
    return text_[at_];
  }
  const Value& next() {
    if (used_ >= left_.size()) throw Error("not enough arguments for format string");
    return left_[used_++];
  }
  int64_t number() {
    if (here() == '*') {
      ++at_;
      const Value& given = next();
      if (!given.is_integer()) throw Error("* wants int");
      return given.integer();
    }
    int64_t out = 0;
    while (absl::ascii_isdigit(static_cast<unsigned char>(here())) && out < kWidest)
      out = out * 10 + (text_[at_++] - '0');
    return out;
  }

  std::string conversion() {
    Style style;
    std::optional<Value> named;
    if (here() == '(') {
      int open = 1;
      const size_t begin = ++at_;
      for (; open > 0; ++at_) open += here() == '(' ? 1 : here() == ')' ? -1 : 0;
      if (args_.dict() == nullptr) throw Error("format requires a mapping");
      const Value* found = find(*args_.dict(), text_.substr(begin, at_ - begin - 1));
      if (found == nullptr) throw Error("a format names a key that is not there");
      named = *found;
      used_ = left_.size();
    }
    for (bool more = true; more; at_ += more ? 1 : 0) {
      const char c = here();
      if (c == '-') style.align = '<';
      if (c == '+' || (c == ' ' && style.sign != '+')) style.sign = c;
      style.zero |= c == '0';
      style.alternate |= c == '#';
      more = c == '-' || c == '+' || c == ' ' || c == '#' || c == '0';
    }
    style.width = number();
    if (style.width < 0) {
      style.align = '<';
      style.width = -style.width;
    }
    if (here() == '.') {
      ++at_;
      style.precision = std::max<int64_t>(number(), 0);
    }
    while (here() == 'h' || here() == 'l' || here() == 'L') ++at_;
    style.type = here();
    ++at_;
    if (style.type == '%') return "%";
    return converted(named.has_value() ? *named : next(), style);
  }

  static std::string converted(const Value& value, Style style) {
    const auto numeric = [&](const std::string& text) {
      if (style.zero && style.align == '\0') {
        style.align = '=';
        style.fill = '0';
      }
      return placed(text, style, '>');
    };
    switch (style.type) {
      case 's':
      case 'r': {
        std::string text = style.type == 's' ? value.str() : value.repr();
        if (style.precision >= 0)
          text = narrow(wide(text).substr(0, static_cast<size_t>(style.precision)));
        return placed(text, style, '>');
      }
      case 'c': {
        const bool one = value.is_string() && count_characters(value.text()) == 1;
        if (!one && (!value.is_integer() || value.integer() < 0 || value.integer() > 0x10ffff)) {
          throw Error("%c requires int or char");
        }
        const auto code = static_cast<char32_t>(one ? 0 : value.integer());
        return placed(one ? value.text() : narrow(std::u32string_view(&code, 1)), style, '>');
      }
      case 'd':
      case 'i':
      case 'u':
      case 'x':
      case 'X':
      case 'o': {
        const bool decimal = style.type == 'd' || style.type == 'i' || style.type == 'u';
        value.used();
        if (!value.is_integer() && !(decimal && value.is_number())) {
          throw Error(concat("%", std::string(1, style.type), " format: a number is required, not ",
                             value.type()));
        }
        return numeric(
            integer_text(value.is_integer() ? value.integer() : truncated(value.number()), style));
      }
      case 'e':
      case 'E':
      case 'f':
      case 'F':
      case 'g':
      case 'G':
        value.used();
        if (!value.is_number()) throw Error(concat("must be real number, not ", value.type()));
        return numeric(float_text(value.number(), style));
      default:
        throw Error(concat("unsupported format character '", std::string(1, style.type), "'"));
    }
  }

  const std::string& text_;
  const Value& args_;
  Values left_;
  size_t at_ = 0, used_ = 0;
};

Style parse_style(const std::string& spec) {
  Style style;
  const std::u32string all = wide(spec);
  size_t at = 0;
  const auto is_align = [&](size_t i) {
    return i < all.size() && (all[i] == '<' || all[i] == '>' || all[i] == '=' || all[i] == '^');
  };
  const auto take = [&](char32_t c) { return at < all.size() && all[at] == c && (++at, true); };
  if (is_align(1)) {
    style.fill = all[0];
    style.align = static_cast<char>(all[1]);
    at = 2;
  } else if (is_align(0)) {
    style.align = static_cast<char>(all[0]);
    at = 1;
  }
  if (at < all.size() && (all[at] == '+' || all[at] == '-' || all[at] == ' '))
    style.sign = static_cast<char>(all[at++]);
  style.alternate = take('#');
  if (take('0')) {
    style.zero = true;
    if (style.align == '\0') {
      style.align = '=';
      style.fill = '0';
    }
  }
  const auto number = [&] {
    int64_t out = 0;
    while (at < all.size() && all[at] >= '0' && all[at] <= '9' && out < kWidest)
      out = out * 10 + static_cast<int64_t>(all[at++] - '0');
    return out;
  };
  style.width = number();
  if (take(',')) style.group = ',';
  if (take('_')) style.group = '_';
  if (take('.')) {
    const size_t before = at;
    style.precision = number();
    if (at == before) throw Error("Format specifier missing precision");
  }
  if (at < all.size()) style.type = static_cast<char>(all[at++]);
  if (at < all.size()) throw Error("Invalid format specifier");
  return style;
}

std::string formatted(const Value& value, const std::string& spec) {
  if (spec.empty()) return value.str();
  Style style = parse_style(spec);
  const std::string_view type(&style.type, 1);
  const auto is_in = [&](std::string_view types) {
    return style.type == '\0' || types.find(style.type) != std::string_view::npos;
  };
  if (value.is_string()) {
    if (value.is_markup()) throw Error("format() of a safe string is not supported");
    if (!is_in("s") || style.sign != '-' || style.alternate || style.group != '\0' ||
        style.align == '=') {
      // "05" of a string: from Python 3.10 on, zeros behind it.
      if (!is_in("s") || !style.zero || style.align != '=')
        throw Error("Invalid format specifier for a string");
      style.align = '<';
    }
    std::string text = value.text();
    if (style.precision >= 0)
      text = narrow(wide(text).substr(0, static_cast<size_t>(style.precision)));
    return placed(text, style, '<');
  }
  if (value.is_number()) {
    const bool integer = value.is_integer() && is_in("dbxXo");
    if (!integer && !is_in("eEfFgG%"))
      throw Error(concat("the format '", type, "' is not supported here"));
    if (integer && style.precision >= 0)
      throw Error("Precision not allowed in integer format specifier");
    if (style.group != '\0' && style.zero)
      throw Error("grouped digits behind zeros are not supported");
    return placed(
        integer ? integer_text(value.integer(), style) : float_text(value.number(), style), style,
        '>');
  }
  throw Error(concat("unsupported format string passed to ", value.type()));
}

// "{}" by "{}" as string.Formatter does.
class Braces {
 public:
  Braces(const Args& args, Budget& budget) : args_(args), budget_(budget) {}

  std::string run(std::string_view text, int depth) {
    if (depth > 2) throw Error("Max string recursion exceeded");
    std::string out;
    for (size_t at = 0; at < text.size();) {
      const char c = text[at];
      if ((c == '{' || c == '}') && at + 1 < text.size() && text[at + 1] == c) {
        out += c;
        at += 2;
      } else if (c == '}') {
        throw Error("Single '}' encountered in format string");
      } else if (c != '{') {
        out += c;
        ++at;
      } else {
        size_t end = at + 1;
        for (int open = 1; end < text.size(); ++end) {
          open += text[end] == '{' ? 1 : text[end] == '}' ? -1 : 0;
          if (open == 0) break;
        }
        if (end >= text.size()) throw Error("expected '}' before end of string");
        out += field(text.substr(at + 1, end - at - 1), depth);
        at = end + 1;
      }
    }
    budget_.take_text(out.size());
    return out;
  }

 private:
  std::string field(std::string_view text, int depth) {
    size_t name_end = 0;
    for (bool bracket = false; name_end < text.size(); ++name_end) {
      const char c = text[name_end];
      if (c == '[') bracket = true;
      if (c == ']') bracket = false;
      if (!bracket && (c == ':' || c == '!')) break;
    }
    Value value = named(text.substr(0, name_end));
    std::string_view rest = text.substr(name_end);
    if (rest.starts_with('!')) {
      if (rest.size() < 2 || (rest.size() > 2 && rest[2] != ':'))
        throw Error("expected ':' after conversion specifier");
      if (rest[1] == 'r') {
        value = value.repr();
      } else if (rest[1] == 's') {
        value = value.str();
      } else {
        throw Error("this conversion of a format is not supported");
      }
      rest.remove_prefix(2);
    }
    if (!rest.empty()) rest.remove_prefix(1);
    return formatted(value, run(rest, depth + 1));
  }

  Value named(std::string_view name) {
    const size_t end = std::min(name.find_first_of(".["), name.size());
    const std::string first(name.substr(0, end));
    Value value;
    const bool digits =
        !first.empty() && std::all_of(first.begin(), first.end(),
                                      [](unsigned char c) { return absl::ascii_isdigit(c); });
    if (first.empty() || digits) {
      if ((first.empty() && numbered_ == 2) || (digits && numbered_ == 1)) {
        throw Error(
            "cannot switch between manual field specification and automatic field numbering");
      }
      numbered_ = digits ? 2 : 1;
      const size_t at =
          digits ? static_cast<size_t>(parse_integer(first, 10).value_or(-1)) : next_++;
      if (at >= args_.positional.size())
        throw Error("Replacement index out of range for positional args tuple");
      value = args_.positional[at];
    } else {
      const auto found = std::find_if(args_.named.begin(), args_.named.end(),
                                      [&](const auto& one) { return one.first == first; });
      if (found == args_.named.end()) throw Error(concat("format() was given no '", first, "'"));
      value = found->second;
    }
    name.remove_prefix(end);
    while (!name.empty()) {
      const bool is_item = name[0] == '[';
      const size_t stop =
          is_item ? name.find(']') : std::min(name.find_first_of(".[", 1), name.size());
      if (stop == std::string_view::npos || stop == 1)
        throw Error("Empty attribute in format string");
      const std::string part(name.substr(1, stop - 1));
      const bool number = is_item && std::all_of(part.begin(), part.end(), [](unsigned char c) {
                            return absl::ascii_isdigit(c);
                          });
      value = number    ? item(value, Value(parse_integer(part, 10).value_or(0)), budget_)
              : is_item ? item(value, Value(part), budget_)
                        : attribute(value, part, budget_);
      name.remove_prefix(stop + (is_item ? 1 : 0));
      if (is_item && !name.empty() && name[0] != '.' && name[0] != '[')
        throw Error("Only '.' or '[' may follow ']' in format field specifier");
    }
    return value;
  }

  const Args& args_;
  Budget& budget_;
  size_t next_ = 0;
  int numbered_ = 0;  // 1: by place, 2: by number
};

}  // namespace

std::string format_percent(const std::string& text, const Value& args, Budget& budget) {
  std::string out = Percent(text, args).run();
  budget.take_text(out.size());
  return out;
}

std::string format_braces(const std::string& text, const Args& args, Budget& budget) {
  return Braces(args, budget).run(text, 1);
}

}  // namespace baton::engine::jinja
