// Values as Python has them, where templates can tell: strings of code points, integers beside
// floats, tuples beside lists, dictionaries in order, what is undefined and why.
#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace baton::engine::jinja {

// Whatever ends the reading or the rendering of a template; jinja/template.h turns it into a
// status.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Text and numbers as one string.
inline void append_part(std::string& out, std::string_view text) { out += text; }
template <std::integral Number>
void append_part(std::string& out, Number number) {
  out += std::to_string(number);
}
template <typename... Parts>
void append(std::string& out, const Parts&... parts) {
  (append_part(out, parts), ...);
}
template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::string out;
  append(out, parts...);
  return out;
}

class Value;
using Values = std::vector<Value>;
// Gives the next value, or false at the end.
using Next = std::function<bool(Value&)>;

struct None {};
struct Undefined {
  std::shared_ptr<const std::string> reason;  // what its use raises
};
struct Text {
  std::shared_ptr<const std::string> text;  // UTF-8
  bool markup = false;                      // "safe": strings that are added to it are escaped
};
struct List {
  Values items;
};
struct Tuple {
  Values items;
  bool group = false;  // groupby's: also .grouper and .list
};
struct Dict {
  std::vector<std::pair<Value, Value>> items;  // in order; no key twice
};
struct Args {
  Values positional;
  std::vector<std::pair<std::string, Value>> named;
};

// Everything else: functions, loops, namespaces, ranges, iterators. By default an object can do
// nothing.
class Object : public std::enable_shared_from_this<Object> {
 public:
  Object() = default;
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;
  virtual ~Object() = default;
  virtual std::string type() const = 0;
  virtual std::string repr() const;  // an error, unless it has a text that is always the same
  virtual std::optional<Value> attribute(const std::string& name);
  virtual std::optional<Value> item(const Value& key);
  virtual std::optional<int64_t> length();
  virtual Next iterate();   // empty: it cannot be iterated
  virtual Next reversed();  // empty: not backwards
  virtual bool callable() const { return false; }
  virtual Value call(const Args& args);
};

class Value {
 public:
  using Data = std::variant<Undefined, None, bool, int64_t, double, Text,
                            std::shared_ptr<const List>, std::shared_ptr<const Tuple>,
                            std::shared_ptr<const Dict>, std::shared_ptr<Object>>;
  Value() = default;
  Value(None none) : data_(none) {}
  Value(Undefined undefined) : data_(std::move(undefined)) {}
  Value(bool truth) : data_(truth) {}
  Value(int64_t number) : data_(number) {}
  Value(double number) : data_(number) {}
  Value(std::string text, bool markup = false)
      : data_(Text{std::make_shared<const std::string>(std::move(text)), markup}) {}
  Value(const char* text) : Value(std::string(text)) {}
  Value(List list) : data_(std::make_shared<const List>(std::move(list))) {}
  Value(Tuple tuple) : data_(std::make_shared<const Tuple>(std::move(tuple))) {}
  Value(Dict dict) : data_(std::make_shared<const Dict>(std::move(dict))) {}
  Value(std::shared_ptr<Object> object) : data_(std::move(object)) {}
  // Throws Error for integers beyond 64 bits.
  static Value of_json(const nlohmann::ordered_json& json);
  static Value undefined(std::string reason);

  template <typename T>
  bool is() const {
    return std::holds_alternative<T>(data_);
  }
  bool is_undefined() const { return is<Undefined>(); }
  bool is_none() const { return is<None>(); }
  bool is_string() const { return is<Text>(); }
  bool is_markup() const { return is_string() && std::get<Text>(data_).markup; }
  bool is_integer() const { return is<int64_t>() || is<bool>(); }  // as isinstance(x, int)
  bool is_number() const { return is_integer() || is<double>(); }
  const Values* sequence() const;  // a list's or a tuple's items
  bool is_list() const { return is<std::shared_ptr<const List>>(); }
  bool is_tuple() const { return is<std::shared_ptr<const Tuple>>(); }
  const Dict* dict() const;
  Object* object() const;
  std::shared_ptr<Object> shared_object() const;
  bool is_group() const;
  const std::string& text() const { return *std::get<Text>(data_).text; }
  int64_t integer() const {
    return is<bool>() ? int64_t{std::get<bool>(data_)} : std::get<int64_t>(data_);
  }
  double number() const {
    return is<double>() ? std::get<double>(data_) : static_cast<double>(integer());
  }

  bool truth() const;
  std::string str() const;   // str(x)
  std::string repr() const;  // repr(x)
  std::string type() const;  // as Jinja's messages name it: "dict object", "None"
  // `x is y` where Python's answer is always the same; else throws.
  bool same_as(const Value& other) const;
  // Iteration; throws where Python would.
  Next iterate() const;
  Values to_list() const;
  std::optional<int64_t> length() const;  // len(); nothing: it has none
  void used() const;                      // throws the reason of what is undefined

 private:
  Data data_ = Undefined{};
};

bool equal(const Value& a, const Value& b);
bool less(const Value& a, const Value& b);  // a < b; throws for what has no order
bool contains(const Value& container, const Value& item);
const Value* find(const Dict& dict, const Value& key);  // throws where the key has no hash
void put(Dict& dict, const Value& key, const Value& value);

std::string float_repr(double number);
Next next_of(Values items);

// A function, a method, a filter's result that is called: what templates call by name.
class Function : public Object {
 public:
  using Body = std::function<Value(const Args&)>;
  Function(std::string name, Body body) : name_(std::move(name)), body_(std::move(body)) {}
  std::string type() const override { return "function " + name_; }
  bool callable() const override { return true; }
  Value call(const Args& args) override { return body_(args); }

 private:
  std::string name_;
  Body body_;
};

Value function(std::string name, Function::Body body);

// A generator: it is gone through once.
class Generator : public Object {
 public:
  explicit Generator(Next next) : next_(std::move(next)) {}
  std::string type() const override { return "generator object"; }
  Next iterate() override {
    return [held = shared_from_this(), this](Value& out) { return next_(out); };
  }

 private:
  Next next_;
};
Value generator(Next next);

class Range : public Object {
 public:
  Range(int64_t start, int64_t stop,
        int64_t step);  // throws for a step of 0 and for too many numbers
  std::string type() const override { return "range object"; }
  std::string repr() const override;
  std::optional<Value> item(const Value& key) override;
  std::optional<int64_t> length() override { return count_; }
  Next iterate() override;
  Next reversed() override;
  int64_t start, stop, step;

 private:
  int64_t count_;
};

// A dictionary's keys(), values() or items().
class DictView : public Object {
 public:
  DictView(std::string name, Values items) : name_(std::move(name)), items_(std::move(items)) {}
  std::string type() const override { return "dict_" + name_ + " object"; }
  std::string repr() const override {
    return "dict_" + name_ + "(" + Value(List{items_}).repr() + ")";
  }
  std::optional<int64_t> length() override { return static_cast<int64_t>(items_.size()); }
  Next iterate() override { return next_of(items_); }
  Next reversed() override { return next_of(Values(items_.rbegin(), items_.rend())); }

 private:
  std::string name_;
  Values items_;
};

class Namespace : public Object {
 public:
  std::string type() const override { return "namespace object"; }
  std::string repr() const override { return "<Namespace " + Value(attributes).repr() + ">"; }
  std::optional<Value> attribute(const std::string& name) override;
  Dict attributes;
};

}  // namespace baton::engine::jinja
