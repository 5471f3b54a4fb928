// Truth, text, order and equality of values, as Python defines them.
#include "engine/jinja/value.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include "engine/files/utf8.h"
#include "engine/jinja/text.h"

namespace baton::engine::jinja {
namespace {

constexpr int64_t kMostInRange = 100000;  // MAX_RANGE of Jinja's sandbox
constexpr int kDeepestValue = 100;        // lists in lists

std::string list_repr(const Values& items, char open, char close) {
  std::string out(1, open);
  for (size_t i = 0; i < items.size(); ++i) append(out, i > 0 ? ", " : "", items[i].repr());
  if (open == '(' && items.size() == 1) out += ',';
  return out + close;
}

Value of_json_at(const nlohmann::ordered_json& json, int depth) {
  if (depth > kDeepestValue) throw Error("values are nested too deeply");
  switch (json.type()) {
    case nlohmann::json::value_t::null:
      return None();
    case nlohmann::json::value_t::boolean:
      return json.get<bool>();
    case nlohmann::json::value_t::number_integer:
      return json.get<int64_t>();
    case nlohmann::json::value_t::number_unsigned:
      if (json.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
        throw Error("integers beyond 64 bits are not supported");
      }
      return json.get<int64_t>();
    case nlohmann::json::value_t::number_float:
      return json.get<double>();
    case nlohmann::json::value_t::string:
      return json.get<std::string>();
    case nlohmann::json::value_t::array: {
      List list;
      for (const auto& one : json) list.items.push_back(of_json_at(one, depth + 1));
      return list;
    }
    case nlohmann::json::value_t::object: {
      Dict dict;
      for (const auto& [key, one] : json.items())
        dict.items.emplace_back(key, of_json_at(one, depth + 1));
      return dict;
    }
    default:
      throw Error("a value is no JSON");
  }
}

bool hashable(const Value& key) {
  if (key.is_tuple()) return std::all_of(key.sequence()->begin(), key.sequence()->end(), hashable);
  return !key.is_list() && key.dict() == nullptr;
}

// The order of two values: below, at or above 0. Where Python has none it throws.
int compare(const Value& a, const Value& b) {
  a.used();
  b.used();
  if (a.is_number() && b.is_number()) {
    if (a.is_integer() && b.is_integer())
      return a.integer() < b.integer() ? -1 : a.integer() > b.integer();
    if (std::isnan(a.number()) || std::isnan(b.number())) throw Error("there is no order of nan");
    return a.number() < b.number() ? -1 : a.number() > b.number();
  }
  if (a.is_string() && b.is_string()) return a.text().compare(b.text());
  if ((a.is_list() && b.is_list()) || (a.is_tuple() && b.is_tuple())) {
    const Values &x = *a.sequence(), &y = *b.sequence();
    for (size_t i = 0; i < std::min(x.size(), y.size()); ++i) {
      if (!equal(x[i], y[i])) return compare(x[i], y[i]);
    }
    return x.size() < y.size() ? -1 : x.size() > y.size();
  }
  throw Error(concat("there is no order of ", a.type(), " and ", b.type()));
}

}  // namespace

std::string Object::repr() const {
  throw Error(concat("a template prints a ", type(), ", whose text is an address in Python"));
}
std::optional<Value> Object::attribute(const std::string&) { return std::nullopt; }
std::optional<Value> Object::item(const Value&) { return std::nullopt; }
std::optional<int64_t> Object::length() { return std::nullopt; }
Next Object::iterate() { return nullptr; }
Next Object::reversed() { return nullptr; }
Value Object::call(const Args&) { throw Error(concat(type(), " is not callable")); }

Value Value::of_json(const nlohmann::ordered_json& json) { return of_json_at(json, 0); }
Value Value::undefined(std::string reason) {
  return Undefined{std::make_shared<const std::string>(std::move(reason))};
}

const Values* Value::sequence() const {
  if (is_list()) return &std::get<std::shared_ptr<const List>>(data_)->items;
  if (is_tuple()) return &std::get<std::shared_ptr<const Tuple>>(data_)->items;
  return nullptr;
}
const Dict* Value::dict() const {
  const auto* dict = std::get_if<std::shared_ptr<const Dict>>(&data_);
  return dict != nullptr ? dict->get() : nullptr;
}
std::shared_ptr<Object> Value::shared_object() const {
  const auto* object = std::get_if<std::shared_ptr<Object>>(&data_);
  return object != nullptr ? *object : nullptr;
}
Object* Value::object() const { return shared_object().get(); }
bool Value::is_group() const {
  return is_tuple() && std::get<std::shared_ptr<const Tuple>>(data_)->group;
}

bool Value::truth() const {
  if (is_number()) return number() != 0;
  if (is_string()) return !text().empty();
  if (sequence() != nullptr) return !sequence()->empty();
  if (dict() != nullptr) return !dict()->items.empty();
  if (object() != nullptr) return object()->length().value_or(1) != 0;
  return false;  // undefined, None
}

std::string Value::str() const {
  if (is_string()) return text();
  return is_undefined() ? "" : repr();
}

std::string Value::repr() const {
  if (is_undefined()) return "Undefined";
  if (is_none()) return "None";
  if (is<bool>()) return std::get<bool>(data_) ? "True" : "False";
  if (is<int64_t>()) return concat(integer());
  if (is<double>()) return float_repr(number());
  if (is_markup()) return concat("Markup(", repr_of(text()), ")");
  if (is_string()) return repr_of(text());
  if (is_list()) return list_repr(*sequence(), '[', ']');
  if (is_tuple()) return list_repr(*sequence(), '(', ')');
  if (object() != nullptr) return object()->repr();
  std::string out = "{";
  for (const auto& [key, value] : dict()->items) {
    append(out, out.size() > 1 ? ", " : "", key.repr(), ": ", value.repr());
  }
  return out + "}";
}

std::string Value::type() const {
  if (is_undefined()) return "undefined value";
  if (is_none()) return "None";
  if (is<bool>()) return "bool object";
  if (is<int64_t>()) return "int object";
  if (is<double>()) return "float object";
  if (is_string()) return "str object";
  if (is_list()) return "list object";
  if (is_tuple()) return "tuple object";
  return dict() != nullptr ? "dict object" : object()->type();
}

bool Value::same_as(const Value& other) const {
  if (data_.index() != other.data_.index() || !equal(*this, other)) return false;
  if (is_none() || is<bool>()) return true;
  if (const auto* a = std::get_if<std::shared_ptr<Object>>(&data_))
    return *a == other.shared_object();
  if (is_list()) return sequence() == other.sequence();
  if (dict() != nullptr) return dict() == other.dict();
  throw Error(
      concat("\"sameas\" of two equal values that are each a ", type(), " is chance in Python"));
}

void Value::used() const {
  if (const auto* undefined = std::get_if<Undefined>(&data_)) {
    throw Error(undefined->reason != nullptr ? *undefined->reason : "a value is undefined");
  }
}

Next next_of(Values items) {
  return [items = std::move(items), at = size_t{0}](Value& out) mutable {
    if (at == items.size()) return false;
    out = items[at++];
    return true;
  };
}

Next Value::iterate() const {
  if (is_undefined()) return [](Value&) { return false; };
  if (sequence() != nullptr) {
    return [held = *this, at = size_t{0}](Value& out) mutable {
      if (at == held.sequence()->size()) return false;
      out = (*held.sequence())[at++];
      return true;
    };
  }
  if (is_string()) {
    return [held = *this, at = size_t{0}](Value& out) mutable {
      if (at >= held.text().size()) return false;
      const size_t bytes = decode_character(held.text(), at).bytes;
      out = Value(held.text().substr(at, bytes));
      at += bytes;
      return true;
    };
  }
  if (dict() != nullptr) {
    return [held = *this, at = size_t{0}](Value& out) mutable {
      if (at == held.dict()->items.size()) return false;
      out = held.dict()->items[at++].first;
      return true;
    };
  }
  if (object() != nullptr) {
    if (Next next = object()->iterate()) return next;
  }
  throw Error(concat(type(), " is not iterable"));
}

Values Value::to_list() const {
  Values out;
  Value one;
  for (const Next next = iterate(); next(one);) out.push_back(one);
  return out;
}

std::optional<int64_t> Value::length() const {
  if (is_undefined()) return 0;
  if (is_string()) return count_characters(text());
  if (sequence() != nullptr) return static_cast<int64_t>(sequence()->size());
  if (dict() != nullptr) return static_cast<int64_t>(dict()->items.size());
  return object() != nullptr ? object()->length() : std::nullopt;
}

bool equal(const Value& a, const Value& b) {
  if (a.is_number() && b.is_number()) {
    return a.is_integer() && b.is_integer() ? a.integer() == b.integer() : a.number() == b.number();
  }
  if (a.is_string() && b.is_string()) return a.text() == b.text();
  if (a.is_undefined() || a.is_none()) return a.is_undefined() ? b.is_undefined() : b.is_none();
  if ((a.is_list() && b.is_list()) || (a.is_tuple() && b.is_tuple())) {
    return std::equal(a.sequence()->begin(), a.sequence()->end(), b.sequence()->begin(),
                      b.sequence()->end(), equal);
  }
  if (a.dict() != nullptr && b.dict() != nullptr) {
    const auto& items = a.dict()->items;
    return items.size() == b.dict()->items.size() &&
           std::all_of(items.begin(), items.end(), [&](const auto& item) {
             const Value* other = find(*b.dict(), item.first);
             return other != nullptr && equal(item.second, *other);
           });
  }
  if (a.object() == nullptr || b.object() == nullptr) return false;
  if (a.object() == b.object()) return true;
  const auto *x = dynamic_cast<Range*>(a.object()), *y = dynamic_cast<Range*>(b.object());
  if (x != nullptr && y != nullptr) return equal(List{a.to_list()}, List{b.to_list()});
  if (dynamic_cast<DictView*>(a.object()) != nullptr &&
      dynamic_cast<DictView*>(b.object()) != nullptr) {
    throw Error("views of dictionaries are not compared");
  }
  return false;
}

bool less(const Value& a, const Value& b) { return compare(a, b) < 0; }

bool contains(const Value& container, const Value& item) {
  if (container.is_string()) {
    item.used();
    if (!item.is_string()) throw Error(concat("a string cannot contain a ", item.type()));
    return container.text().find(item.text()) != std::string::npos;
  }
  if (container.dict() != nullptr) return find(*container.dict(), item) != nullptr;
  Value one;
  for (const Next next = container.iterate(); next(one);) {
    if (equal(one, item)) return true;
  }
  return false;
}

const Value* find(const Dict& dict, const Value& key) {
  if (!hashable(key)) throw Error(concat("a ", key.type(), " cannot be a key: it has no hash"));
  for (const auto& [one, value] : dict.items) {
    if (equal(one, key)) return &value;
  }
  return nullptr;
}

void put(Dict& dict, const Value& key, const Value& value) {
  if (find(dict, key) == nullptr) {
    dict.items.emplace_back(key, value);
    return;
  }
  for (auto& [one, there] : dict.items) {
    if (equal(one, key)) there = value;
  }
}

std::string float_repr(double number) {
  if (std::isnan(number)) return "nan";
  if (std::isinf(number)) return number > 0 ? "inf" : "-inf";
  char text[64];
  const double size = std::fabs(number);
  const bool fixed = number == 0 || (size >= 1e-4 && size < 1e16);
  const auto end = std::to_chars(text, text + sizeof text, number,
                                 fixed ? std::chars_format::fixed : std::chars_format::scientific)
                       .ptr;
  std::string out(text, end);
  if (fixed && out.find('.') == std::string::npos) out += ".0";
  return out;
}

Value function(std::string name, Function::Body body) {
  return std::shared_ptr<Object>(std::make_shared<Function>(std::move(name), std::move(body)));
}

Value generator(Next next) {
  return std::shared_ptr<Object>(std::make_shared<Generator>(std::move(next)));
}

Range::Range(int64_t from, int64_t to, int64_t by) : start(from), stop(to), step(by) {
  if (step == 0) throw Error("range() arg 3 must not be zero");
  const auto far = [&](int64_t n) { return n > (int64_t{1} << 60) || n < -(int64_t{1} << 60); };
  if (far(start) || far(stop) || far(step)) throw Error("the numbers of a range are too large");
  const int64_t distance = step > 0 ? stop - start : start - stop, stride = std::abs(step);
  count_ = distance <= 0 ? 0 : (distance + stride - 1) / stride;
  if (count_ > kMostInRange)
    throw Error("Range too big. The sandbox blocks ranges larger than MAX_RANGE (100000).");
}

std::string Range::repr() const {
  std::string out = concat("range(", start, ", ", stop);
  if (step != 1) append(out, ", ", step);
  return out + ")";
}

std::optional<Value> Range::item(const Value& key) {
  if (!key.is_integer()) return std::nullopt;
  const int64_t at = key.integer() < 0 ? key.integer() + count_ : key.integer();
  if (at < 0 || at >= count_) return std::nullopt;
  return Value(start + at * step);
}

Next Range::iterate() {
  return [at = start, left = count_, by = step](Value& out) mutable {
    if (left-- <= 0) return false;
    out = Value(at);
    at += by;
    return true;
  };
}

Next Range::reversed() { return Range(start + (count_ - 1) * step, start - step, -step).iterate(); }

std::optional<Value> Namespace::attribute(const std::string& name) {
  if (const Value* found = find(attributes, Value(name))) return *found;
  return std::nullopt;
}

}  // namespace baton::engine::jinja
