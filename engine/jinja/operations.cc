// Operators, attributes and items.
#include "engine/jinja/operations.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "engine/jinja/text.h"

namespace baton::engine::jinja {
namespace {

constexpr size_t kLongestText = size_t{64} << 20;
constexpr int64_t kExact = int64_t{1} << 53;  // up to here, floats are exact integers

[[noreturn]] void too_large() { throw Error("integers beyond 64 bits are not supported"); }

Value integers(std::string_view operation, int64_t a, int64_t b) {
  int64_t out = 0;
  const auto checked = [&](bool overflow) {
    if (overflow) too_large();
    return Value(out);
  };
  if (operation == "+") return checked(__builtin_add_overflow(a, b, &out));
  if (operation == "-") return checked(__builtin_sub_overflow(a, b, &out));
  if (operation == "*") return checked(__builtin_mul_overflow(a, b, &out));
  if (operation == "**") {
    if (b < 0) {
      if (a == 0) throw Error("0 cannot be raised to a negative power");
      return std::pow(static_cast<double>(a), static_cast<double>(b));
    }
    out = 1;
    for (int64_t i = 0; i < b && out != 0 && (a != 1); ++i) {
      if (a == -1) return Value(int64_t{b % 2 == 0 ? 1 : -1});
      if (__builtin_mul_overflow(out, a, &out)) too_large();
    }
    return Value(out);
  }
  if (b == 0) throw Error("division by zero");
  if (operation == "/") {
    if (std::llabs(a) > kExact || std::llabs(b) > kExact)
      throw Error("such large integers are not divided");
    return static_cast<double>(a) / static_cast<double>(b);
  }
  if (b == -1) return operation == "//" ? integers("*", a, -1) : Value(int64_t{0});
  const int64_t quotient = a / b, rest = a % b;
  const bool down = rest != 0 && (rest < 0) != (b < 0);
  return operation == "//" ? Value(quotient - (down ? 1 : 0)) : Value(down ? rest + b : rest);
}

Value floats(std::string_view operation, double a, double b) {
  if (operation == "+") return a + b;
  if (operation == "-") return a - b;
  if (operation == "*") return a * b;
  if (operation == "**") {
    if (a == 0 && b < 0) throw Error("0 cannot be raised to a negative power");
    if (a < 0 && b != std::floor(b)) throw Error("the power is a complex number");
    const double power = std::pow(a, b);
    if (std::isinf(power) && std::isfinite(a) && std::isfinite(b))
      throw Error("the power is too large");
    return power;
  }
  if (b == 0) throw Error("float division by zero");
  if (operation == "/") return a / b;
  double rest = std::fmod(a, b), quotient = (a - rest) / b;
  if (rest != 0) {
    if ((b < 0) != (rest < 0)) {
      rest += b;
      quotient -= 1;
    }
  } else {
    rest = std::copysign(0.0, b);
  }
  if (operation == "%") return rest;
  if (quotient == 0) return std::copysign(0.0, a / b);
  const double floor = std::floor(quotient);
  return quotient - floor > 0.5 ? floor + 1 : floor;
}

Value repeated(const Value& what, int64_t times, Budget& budget) {
  times = std::max<int64_t>(times, 0);
  if (what.is_string()) {
    const size_t size = what.text().size();
    if (size > 0 && static_cast<uint64_t>(times) > kLongestText / size)
      throw Error("a string is too long");
    budget.take_text(size * static_cast<size_t>(times));
    std::string out;
    for (int64_t i = 0; i < times && size > 0; ++i) out += what.text();
    return {out, what.is_markup()};
  }
  Values out;
  if (!what.sequence()->empty())
    budget.take(std::min<int64_t>(times, 1 << 30) * static_cast<int64_t>(what.sequence()->size()));
  for (int64_t i = 0; i < times && !what.sequence()->empty(); ++i) {
    out.insert(out.end(), what.sequence()->begin(), what.sequence()->end());
  }
  return what.is_list() ? Value(List{std::move(out)}) : Value(Tuple{.items = std::move(out)});
}

Value missing(const Value& value, const Value& key) {
  return Value::undefined(key.is_string()
                              ? concat("'", value.type(), "' has no attribute ", key.repr())
                              : concat(value.type(), " has no element ", key.repr()));
}

// The attribute that Python's object has, not the key of a dictionary.
std::optional<Value> own_attribute(const Value& value, const std::string& name, Budget& budget) {
  if (name.starts_with("__")) throw Error(concat("access to attribute '", name, "' is unsafe"));
  std::optional<Value> found =
      value.object() != nullptr ? value.object()->attribute(name) : method(value, name, budget);
  if (found.has_value() && name.starts_with('_')) return unsafe(value, name);
  return found;
}

std::optional<Value> own_item(const Value& value, const Value& key) {
  if (const Dict* dict = value.dict()) {
    if (key.is_list() || key.dict() != nullptr) return std::nullopt;
    const Value* found = find(*dict, key);
    return found != nullptr ? std::optional<Value>(*found) : std::nullopt;
  }
  if (value.object() != nullptr) return value.object()->item(key);
  const std::optional<int64_t> length = value.length();
  if (!key.is_integer() || !length.has_value()) return std::nullopt;
  const int64_t at = key.integer() < 0 ? key.integer() + *length : key.integer();
  if (at < 0 || at >= *length) return std::nullopt;
  if (value.sequence() != nullptr) return (*value.sequence())[static_cast<size_t>(at)];
  return Value(narrow(wide(value.text()).substr(static_cast<size_t>(at), 1)), value.is_markup());
}

}  // namespace

Value unsafe(const Value& value, const std::string& name) {
  return Value::undefined(
      concat("access to attribute '", name, "' of '", value.type(), "' is unsafe."));
}

void Budget::take(int64_t steps) {
  steps_ -= steps;
  if (steps_ < 0) throw Error("the template takes too long");
}

void Budget::take_text(size_t bytes) {
  if (bytes > kLongestText) throw Error("a string is too long");
  take(static_cast<int64_t>(bytes / 256));
}

Value binary(std::string_view operation, const Value& a, const Value& b, Budget& budget) {
  if (operation == "%" && a.is_string()) {
    if (a.is_markup()) throw Error("% of a safe string is not supported");
    return format_percent(a.text(), b, budget);
  }
  a.used();
  b.used();
  if (a.is_number() && b.is_number()) {
    return a.is_integer() && b.is_integer() ? integers(operation, a.integer(), b.integer())
                                            : floats(operation, a.number(), b.number());
  }
  if (operation == "+" && a.is_string() && b.is_string()) {
    budget.take_text(a.text().size() + b.text().size());
    if (!a.is_markup() && !b.is_markup()) return a.text() + b.text();
    return {(a.is_markup() ? a.text() : escape_html(a.text())) +
                (b.is_markup() ? b.text() : escape_html(b.text())),
            true};
  }
  if (operation == "+" && ((a.is_list() && b.is_list()) || (a.is_tuple() && b.is_tuple()))) {
    Values out = *a.sequence();
    out.insert(out.end(), b.sequence()->begin(), b.sequence()->end());
    budget.take(static_cast<int64_t>(out.size()));
    return a.is_list() ? Value(List{std::move(out)}) : Value(Tuple{.items = std::move(out)});
  }
  const auto repeats = [](const Value& what) {
    return what.is_string() || what.sequence() != nullptr;
  };
  if (operation == "*" && repeats(a) && b.is_integer()) return repeated(a, b.integer(), budget);
  if (operation == "*" && repeats(b) && a.is_integer()) return repeated(b, a.integer(), budget);
  throw Error(concat("there is no ", operation, " of ", a.type(), " and ", b.type()));
}

Value negative(const Value& a) {
  a.used();
  if (a.is_integer()) return integers("*", a.integer(), -1);
  if (a.is_number()) return -a.number();
  throw Error(concat("there is no - of ", a.type()));
}

bool compare(std::string_view operation, const Value& a, const Value& b) {
  if (operation == "==") return equal(a, b);
  if (operation == "!=") return !equal(a, b);
  if (operation == "in") return contains(b, a);
  if (operation == "not in") return !contains(b, a);
  if (operation == "<") return less(a, b);
  if (operation == ">") return less(b, a);
  return operation == "<=" ? !less(b, a) : !less(a, b);
}

Value attribute(const Value& value, const std::string& name, Budget& budget) {
  value.used();
  if (const auto found = own_attribute(value, name, budget)) return *found;
  if (const auto found = own_item(value, name)) return *found;
  return missing(value, name);
}

Value item(const Value& value, const Value& key, Budget& budget) {
  value.used();
  if (const auto found = own_item(value, key)) return *found;
  if (key.is_string()) {
    if (const auto found = own_attribute(value, key.text(), budget)) return *found;
  }
  return missing(value, key);
}

Value slice(const Value& value, const Value& start, const Value& stop, const Value& step) {
  value.used();
  for (const Value* bound : {&start, &stop, &step}) {
    bound->used();
    if (!bound->is_none() && !bound->is_integer())
      throw Error("the bounds of a slice must be integers or None");
  }
  const auto* range = dynamic_cast<Range*>(value.object());
  if (!value.is_string() && value.sequence() == nullptr && range == nullptr) {
    throw Error(concat("slices of a ", value.type(), " are not supported"));
  }
  const std::u32string characters = value.is_string() ? wide(value.text()) : std::u32string();
  const int64_t length =
      value.is_string() ? static_cast<int64_t>(characters.size()) : *value.length();
  const int64_t by = step.is_none() ? 1 : step.integer();
  if (by == 0) throw Error("slice step cannot be zero");
  const int64_t low = by > 0 ? 0 : -1, high = by > 0 ? length : length - 1;
  const auto bound = [&](const Value& given, int64_t fallback) {
    if (given.is_none()) return fallback;
    int64_t at = given.integer();
    if (at < 0) at = std::max(at, -length - 1) + length;
    return std::clamp(at, low, high);
  };
  const int64_t from = bound(start, by > 0 ? low : high), to = bound(stop, by > 0 ? high : low);
  if (range != nullptr) {
    return std::shared_ptr<Object>(std::make_shared<Range>(
        range->start + from * range->step, range->start + to * range->step, range->step * by));
  }
  std::u32string text;
  Values items;
  for (int64_t at = from; by > 0 ? at < to : at > to;) {
    if (value.is_string()) {
      text += characters[static_cast<size_t>(at)];
    } else {
      items.push_back((*value.sequence())[static_cast<size_t>(at)]);
    }
    if (__builtin_add_overflow(at, by, &at)) break;
  }
  if (value.is_string()) return {narrow(text), value.is_markup()};
  return value.is_list() ? Value(List{std::move(items)}) : Value(Tuple{.items = std::move(items)});
}

Value call(const Value& function, const Args& args) {
  function.used();
  if (function.object() == nullptr || !function.object()->callable()) {
    throw Error(concat("a ", function.type(), " is not callable"));
  }
  const std::shared_ptr<Object> held = function.shared_object();
  return held->call(args);
}

}  // namespace baton::engine::jinja
