// What stands behind "is".
#include <cmath>
#include <map>

#include "engine/jinja/arguments.h"
#include "engine/jinja/operations.h"
#include "engine/jinja/text.h"

namespace baton::engine::jinja {
namespace {

using Plain = bool (*)(const Value& value);  // without arguments
using Test = bool (*)(const Value& value, const Args& args);

Value remainder(const Value& value, const Value& by) {
  Budget budget;
  return binary("%", value, by, budget);
}

const char kOrders[][3] = {"==", "!=", "<", "<=", ">", ">="};
template <int kOrder>
bool order(const Value& value, const Args& args) {
  const Arguments given("a comparing test", args, {"/other"}, 1);
  return compare(kOrders[kOrder], value, given.at(0));
}

bool is_hashable(const Value& value) {
  return find(Dict(), value) == nullptr;
}  // throws where it is not

bool is_iterable(const Value& value) {
  if (value.object() != nullptr) return value.object()->iterate() != nullptr;
  return value.is_undefined() || value.length().has_value();
}

const std::map<std::string, Plain, std::less<>>& plain_tests() {
  static const std::map<std::string, Plain, std::less<>> all = {
      {"defined", [](const Value& v) { return !v.is_undefined(); }},
      {"undefined", [](const Value& v) { return v.is_undefined(); }},
      {"none", [](const Value& v) { return v.is_none(); }},
      {"boolean", [](const Value& v) { return v.is<bool>(); }},
      {"true", [](const Value& v) { return v.is<bool>() && v.truth(); }},
      {"false", [](const Value& v) { return v.is<bool>() && !v.truth(); }},
      {"integer", [](const Value& v) { return v.is<int64_t>(); }},
      {"float", [](const Value& v) { return v.is<double>(); }},
      {"number", [](const Value& v) { return v.is_number(); }},
      {"string", [](const Value& v) { return v.is_string(); }},
      {"mapping", [](const Value& v) { return v.dict() != nullptr; }},
      {"iterable", is_iterable},
      {"sequence",
       [](const Value& v) {
         const bool view = dynamic_cast<DictView*>(v.object()) != nullptr;
         return v.length().has_value() && !view &&
                (v.object() == nullptr || dynamic_cast<Range*>(v.object()) != nullptr);
       }},
      {"callable",
       [](const Value& v) {
         return v.is_undefined() || (v.object() != nullptr && v.object()->callable());
       }},
      {"escaped", [](const Value& v) { return v.is_markup(); }},
      {"lower", [](const Value& v) { return *ask("islower", v.str()); }},
      {"upper", [](const Value& v) { return *ask("isupper", v.str()); }},
      {"odd", [](const Value& v) { return equal(remainder(v, int64_t{2}), int64_t{1}); }},
      {"even", [](const Value& v) { return equal(remainder(v, int64_t{2}), int64_t{0}); }},
      {"filter",
       [](const Value& v) { return is_hashable(v) && v.is_string() && is_jinja_filter(v.text()); }},
      {"test",
       [](const Value& v) { return is_hashable(v) && v.is_string() && knows_test(v.text()); }},
  };
  return all;
}

const std::map<std::string, Test, std::less<>>& tests() {
  static const std::map<std::string, Test, std::less<>> all = {
      {"divisibleby",
       [](const Value& v, const Args& args) {
         const Arguments given("divisibleby", args, {"num"}, 1);
         return equal(remainder(v, given.at(0)), int64_t{0});
       }},
      {"sameas",
       [](const Value& v, const Args& args) {
         const Arguments given("sameas", args, {"other"}, 1);
         return v.same_as(given.at(0));
       }},
      {"in",
       [](const Value& v, const Args& args) {
         const Arguments given("in", args, {"seq"}, 1);
         return contains(given.at(0), v);
       }},
      {"==", order<0>},
      {"eq", order<0>},
      {"equalto", order<0>},
      {"!=", order<1>},
      {"ne", order<1>},
      {"<", order<2>},
      {"lt", order<2>},
      {"lessthan", order<2>},
      {"<=", order<3>},
      {"le", order<3>},
      {">", order<4>},
      {"gt", order<4>},
      {"greaterthan", order<4>},
      {">=", order<5>},
      {"ge", order<5>},
  };
  return all;
}

}  // namespace

bool knows_test(std::string_view name) {
  return plain_tests().contains(name) || tests().contains(name);
}

bool call_test(const std::string& name, const Value& value, const Args& args) {
  if (const auto plain = plain_tests().find(name); plain != plain_tests().end()) {
    const Arguments given(name, args, {});
    return plain->second(value);
  }
  const auto found = tests().find(name);
  if (found == tests().end()) throw Error(concat("No test named '", name, "'."));
  return found->second(value, args);
}

}  // namespace baton::engine::jinja
