// json.dumps(), which templates know as the filter "tojson".
#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"
#include "engine/jinja/operations.h"
#include "engine/jinja/text.h"

namespace baton::engine::jinja {
namespace {

void write_string(std::string& out, const std::string& text, bool ascii) {
  out += '"';
  for (const char32_t c : wide(text)) {
    constexpr std::string_view kFrom = "\"\\\n\r\t\f\b", kTo = "\"\\nrtfb";
    const size_t short_form = c < 0x80 ? kFrom.find(static_cast<char>(c)) : std::string_view::npos;
    const auto code = static_cast<uint32_t>(c);
    if (short_form != std::string_view::npos) {
      out += {'\\', kTo[short_form]};
    } else if (code < 0x20 || (ascii && code >= 0x7f && code < 0x10000)) {
      absl::StrAppendFormat(&out, "\\u%04x", code);
    } else if (ascii && code >= 0x10000) {
      absl::StrAppendFormat(&out, "\\u%04x\\u%04x", 0xd800 + ((code - 0x10000) >> 10),
                            0xdc00 + ((code - 0x10000) & 0x3ff));
    } else {
      out += narrow(std::u32string_view(&c, 1));
    }
  }
  out += '"';
}

std::string number_text(const Value& value) {
  if (value.is<bool>()) return value.truth() ? "true" : "false";
  if (value.is_integer()) return value.repr();
  if (std::isnan(value.number())) return "NaN";
  if (std::isinf(value.number())) return value.number() > 0 ? "Infinity" : "-Infinity";
  return value.repr();
}

void write(std::string& out, const Value& value, const JsonStyle& style, const std::string& line) {
  const std::string inner = style.indent.has_value() ? line + *style.indent : "";
  bool first = true;
  const auto begin_item = [&] {
    if (!first) out += style.comma;
    if (style.indent.has_value()) out += inner;
    first = false;
  };
  const auto close = [&](char bracket) {
    if (!first && style.indent.has_value()) out += line;
    out += bracket;
  };
  if (value.is_none()) {
    out += "null";
  } else if (value.is_number()) {
    out += number_text(value);
  } else if (value.is_string()) {
    write_string(out, value.text(), style.ascii);
  } else if (value.sequence() != nullptr) {
    out += '[';
    for (const Value& one : *value.sequence()) {
      begin_item();
      write(out, one, style, inner);
    }
    close(']');
  } else if (value.dict() != nullptr) {
    auto items = value.dict()->items;
    if (style.sorted) {
      std::stable_sort(items.begin(), items.end(),
                       [](const auto& a, const auto& b) { return less(a.first, b.first); });
    }
    out += '{';
    for (const auto& [key, one] : items) {
      begin_item();
      if (!key.is_string() && !key.is_number() && !key.is_none()) {
        throw Error(concat("tojson: keys must be str, int, float, bool or None, not ", key.type()));
      }
      write_string(out,
                   key.is_string() ? key.text()
                   : key.is_none() ? "null"
                                   : number_text(key),
                   style.ascii);
      out += style.colon;
      write(out, one, style, inner);
    }
    close('}');
  } else {
    throw Error(concat("tojson: a ", value.type(), " is not JSON serializable"));
  }
}

}  // namespace

std::string to_json(const Value& value, const JsonStyle& style) {
  std::string out;
  write(out, value, style, "\n");
  return out;
}

}  // namespace baton::engine::jinja
