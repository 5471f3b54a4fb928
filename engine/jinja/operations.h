// What templates do with values: operators, attributes, items, methods, calls of filters and tests
// by name.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "engine/jinja/value.h"

namespace baton::engine::jinja {

// What a rendering may still do. A template that does more is stopped.
class Budget {
 public:
  void take(int64_t steps);      // throws at the end
  void take_text(size_t bytes);  // of a new string; throws where it is too large
 private:
  int64_t steps_ = 5'000'000;
};

Value binary(std::string_view operation, const Value& a, const Value& b, Budget& budget);
Value negative(const Value& a);
bool compare(std::string_view operation, const Value& a, const Value& b);
// x.name and x[key]; what is not there is undefined.
Value attribute(const Value& value, const std::string& name, Budget& budget);
Value item(const Value& value, const Value& key, Budget& budget);
Value slice(const Value& value, const Value& start, const Value& stop, const Value& step);
Value call(const Value& function, const Args& args);
Value unsafe(const Value& value,
             const std::string& name);  // an attribute that templates may not use

// The method of a value, or nothing: not of dictionaries' keys (methods.cc).
std::optional<Value> method(const Value& value, const std::string& name, Budget& budget);

// Throws for names that are none (filters.cc, tests.cc).
Value call_filter(const std::string& name, const Value& value, const Args& args, Budget& budget);
bool call_test(const std::string& name, const Value& value, const Args& args);

// `text % args` and `text.format(...)` (format.cc).
std::string format_percent(const std::string& text, const Value& args, Budget& budget);
std::string format_braces(const std::string& text, const Args& args, Budget& budget);

// int(x) and float(x) of a string; nothing where Python raises ValueError (numbers.cc).
std::optional<int64_t> parse_integer(std::string_view text, int64_t base);
std::optional<double> parse_float(std::string_view text);
int64_t truncated(double number);  // int(x); throws where it is too large
double rounded(double number, int64_t digits);

// What templates may call by name.
bool knows_filter(std::string_view name);
bool is_jinja_filter(std::string_view name);  // of Jinja2's own, known or not
bool knows_test(std::string_view name);       // all of Jinja2's own
bool is_jinja_tag(std::string_view name);
// A method of Python's strings, lists, dictionaries or numbers that is not here.
bool is_unsupported_method(std::string_view name);

struct JsonStyle {
  bool ascii = false, sorted = false;
  std::optional<std::string> indent;
  std::string comma = ", ", colon = ": ";
};
std::string to_json(const Value& value, const JsonStyle& style);  // (json_text.cc)

}  // namespace baton::engine::jinja
