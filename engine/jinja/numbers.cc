// Numbers from text, and rounding, as Python does both.
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "absl/strings/ascii.h"
#include "engine/jinja/operations.h"
#include "engine/jinja/text.h"

namespace baton::engine::jinja {
namespace {

// Without underscores, each of which must stand between two digits; nothing where one does not.
std::optional<std::string> without_underscores(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (static_cast<unsigned char>(text[i]) >= 0x80)
      throw Error("numbers with digits beyond ASCII are not supported");
    const auto digit = [&](size_t at) {
      return at < text.size() && absl::ascii_isalnum(static_cast<unsigned char>(text[at]));
    };
    if (text[i] != '_') {
      out += text[i];
    } else if (i == 0 || !digit(i - 1) || !digit(i + 1)) {
      return std::nullopt;
    }
  }
  return out;
}

}  // namespace

std::optional<int64_t> parse_integer(std::string_view given, int64_t base) {
  if (base != 0 && (base < 2 || base > 36)) throw Error("int() base must be >= 2 and <= 36, or 0");
  const std::string stripped = strip(given, nullptr, true, true);
  std::string_view text = stripped;
  const bool minus = text.starts_with('-');
  if (minus || text.starts_with('+')) text.remove_prefix(1);
  const char mark = text.size() > 1 && text[0] == '0'
                        ? absl::ascii_tolower(static_cast<unsigned char>(text[1]))
                        : '\0';
  const int64_t marked = mark == 'x' ? 16 : mark == 'o' ? 8 : mark == 'b' ? 2 : 0;
  if (marked != 0 && (base == 0 || base == marked)) {
    text.remove_prefix(2);
    if (text.starts_with('_')) text.remove_prefix(1);
    base = marked;
  } else if (base == 0) {
    if (text.size() > 1 && text[0] == '0' && text.find_first_not_of("0_") != std::string_view::npos)
      return std::nullopt;
    base = 10;
  }
  const std::optional<std::string> digits = without_underscores(text);
  if (!digits.has_value() || digits->empty() || digits->starts_with('-')) return std::nullopt;
  int64_t value = 0;
  const auto [end, error] = std::from_chars(digits->data(), digits->data() + digits->size(), value,
                                            static_cast<int>(base));
  if (end != digits->data() + digits->size()) return std::nullopt;
  if (error == std::errc::result_out_of_range)
    throw Error("integers beyond 64 bits are not supported");
  if (error != std::errc()) return std::nullopt;
  return minus ? -value : value;
}

std::optional<double> parse_float(std::string_view given) {
  std::string text = absl::AsciiStrToLower(strip(given, nullptr, true, true));
  const bool minus = text.starts_with('-');
  if (minus || text.starts_with('+')) text.erase(0, 1);
  double value = 0;
  if (text == "inf" || text == "infinity") {
    value = HUGE_VAL;
  } else if (text == "nan") {
    value = std::nan("");
  } else {
    const std::optional<std::string> digits = without_underscores(text);
    if (!digits.has_value() || digits->empty() || digits->starts_with('-') ||
        absl::ascii_isalpha(static_cast<unsigned char>((*digits)[0]))) {
      return std::nullopt;
    }
    const auto [end, error] =
        std::from_chars(digits->data(), digits->data() + digits->size(), value);
    if (end != digits->data() + digits->size()) return std::nullopt;
    if (error == std::errc::result_out_of_range) value = std::strtod(digits->c_str(), nullptr);
  }
  return minus ? -value : value;
}

int64_t truncated(double number) {
  if (!(std::fabs(number) < 9.2e18))
    throw Error(concat("cannot convert ", float_repr(number), " to an integer of 64 bits"));
  return static_cast<int64_t>(number);
}

// Half to even, of the number that the float really is.
double rounded(double number, int64_t digits) {
  if (!std::isfinite(number) || digits > 308) return number;
  if (digits < 0) {
    const double unit = std::pow(10.0, static_cast<double>(-digits));
    if (digits < -15 || std::fabs(number) >= 9e15 || number != std::floor(number)) {
      throw Error("rounding such a number to tens is not supported");
    }
    return std::nearbyint(number / unit) * unit;
  }
  char text[700];
  std::snprintf(text, sizeof text, "%.*f", static_cast<int>(digits), number);
  return std::strtod(text, nullptr);
}

}  // namespace baton::engine::jinja
