// Methods of strings, lists, tuples and dictionaries. Those that would change a list or a
// dictionary are unsafe, as in transformers' sandbox.
#include <algorithm>
#include <array>
#include <map>

#include "engine/jinja/arguments.h"
#include "engine/jinja/operations.h"
#include "engine/jinja/text.h"

namespace baton::engine::jinja {
namespace {

using Method = Value (*)(const Value& self, const Args& args, Budget& budget);

Value strings(std::vector<std::string> all) {
  List list;
  for (std::string& one : all) list.items.emplace_back(std::move(one));
  return list;
}

Value tuple_of(std::initializer_list<std::string_view> all) {
  Tuple tuple;
  for (const std::string_view one : all) tuple.items.emplace_back(std::string(one));
  return tuple;
}

template <bool kLeft, bool kRight>
Value strip_method(const Value& self, const Args& args, Budget&) {
  const Arguments given("strip", args, {"/chars"});
  const std::string characters = given.has_some(0) ? given.text(0) : "";
  return strip(self.text(), given.has_some(0) ? &characters : nullptr, kLeft, kRight);
}

template <bool kFromRight>
Value split_method(const Value& self, const Args& args, Budget&) {
  const Arguments given("split", args, {"sep", "maxsplit"});
  const std::string separator = given.has_some(0) ? given.text(0) : "";
  if (given.has_some(0) && separator.empty()) throw Error("empty separator");
  return strings(split(self.text(), given.has_some(0) ? &separator : nullptr, given.integer(1, -1),
                       kFromRight));
}

template <std::string (*kChange)(std::string_view)>
Value change_method(const Value& self, const Args& args, Budget&) {
  const Arguments given("a method of strings", args, {});
  return kChange(self.text());
}

// The characters of `self` from a start to an end, which count from the end where they are
// negative; nothing where the start lies behind the text.
struct Part {
  std::u32string text;
  int64_t start;
};
std::optional<Part> part_of(const Value& self, const Arguments& given) {
  std::u32string all = wide(self.text());
  const auto length = static_cast<int64_t>(all.size());
  const auto place = [&](size_t i, int64_t fallback) {
    if (!given.has_some(i)) return fallback;
    const int64_t at = given.integer(i);
    return at < 0 ? std::max<int64_t>(std::max(at, -length) + length, 0) : at;
  };
  const int64_t start = place(1, 0), end = std::min(place(2, length), length);
  if (start > length || start > end) return std::nullopt;
  return Part{all.substr(static_cast<size_t>(start), static_cast<size_t>(end - start)), start};
}

template <bool kEnd>
Value starts_method(const Value& self, const Args& args, Budget&) {
  const Arguments given(kEnd ? "endswith" : "startswith", args, {"/prefix", "/start", "/end"}, 1);
  const std::optional<Part> part = part_of(self, given);
  const auto fits = [&](const Value& one) {
    one.used();
    if (!one.is_string())
      throw Error("startswith and endswith take a string or a tuple of strings");
    if (!part.has_value()) return false;
    const std::u32string_view text = part->text;
    return kEnd ? text.ends_with(wide(one.text())) : text.starts_with(wide(one.text()));
  };
  if (!given.at(0).is_tuple()) return fits(given.at(0));
  const Values& all = *given.at(0).sequence();
  return std::any_of(all.begin(), all.end(), fits);
}

template <bool kLast, bool kMust>
Value find_method(const Value& self, const Args& args, Budget&) {
  const Arguments given("find", args, {"/sub", "/start", "/end"}, 1);
  const std::optional<Part> part = part_of(self, given);
  const std::u32string what = wide(given.text(0));
  const size_t at = !part.has_value() ? std::u32string::npos
                    : kLast           ? part->text.rfind(what)
                                      : part->text.find(what);
  if (at != std::u32string::npos) return part->start + static_cast<int64_t>(at);
  if (kMust) throw Error("substring not found");
  return int64_t{-1};
}

Value count_method(const Value& self, const Args& args, Budget&) {
  const Arguments given("count", args, {"/sub", "/start", "/end"}, 1);
  const std::optional<Part> part = part_of(self, given);
  const std::u32string what = wide(given.text(0));
  if (!part.has_value()) return int64_t{0};
  if (what.empty()) return static_cast<int64_t>(part->text.size()) + 1;
  int64_t count = 0;
  for (size_t at = part->text.find(what); at != std::u32string::npos;
       at = part->text.find(what, at + what.size()))
    ++count;
  return count;
}

Value replace_method(const Value& self, const Args& args, Budget& budget) {
  const Arguments given("replace", args, {"/old", "/new", "/count"}, 2);
  std::string out = replace(self.text(), given.text(0), given.text(1), given.integer(2, -1));
  budget.take_text(out.size());
  return out;
}

Value join_method(const Value& self, const Args& args, Budget& budget) {
  const Arguments given("join", args, {"/iterable"}, 1);
  std::string out;
  bool first = true;
  Value one;
  for (const Next next = given.at(0).iterate(); next(one); first = false) {
    if (!one.is_string()) throw Error(concat("join: a ", one.type(), " is no string"));
    append(out, first ? "" : self.text(), one.text());
    budget.take_text(one.text().size());
  }
  budget.take_text(out.size());
  return out;
}

template <bool kLast>
Value partition_method(const Value& self, const Args& args, Budget&) {
  const Arguments given("partition", args, {"/sep"}, 1);
  const std::string_view text = self.text();
  const std::string separator = given.text(0);
  if (separator.empty()) throw Error("empty separator");
  const size_t at = kLast ? text.rfind(separator) : text.find(separator);
  if (at == std::string_view::npos)
    return kLast ? tuple_of({"", "", text}) : tuple_of({text, "", ""});
  return tuple_of({text.substr(0, at), separator, text.substr(at + separator.size())});
}

template <bool kSuffix>
Value remove_method(const Value& self, const Args& args, Budget&) {
  const Arguments given("removeprefix", args, {"/prefix"}, 1);
  const std::string what = given.text(0);
  std::string text = self.text();
  if (kSuffix && text.ends_with(what)) text.resize(text.size() - what.size());
  if (!kSuffix && text.starts_with(what)) text.erase(0, what.size());
  return text;
}

template <char kWhere>
Value pad_method(const Value& self, const Args& args, Budget& budget) {
  const Arguments given("center", args, {"/width", "/fillchar"}, 1);
  const std::u32string fill = wide(given.text(1, kWhere == 'z' ? "0" : " "));
  if (fill.size() != 1) throw Error("The fill character must be exactly one character long");
  budget.take_text(static_cast<size_t>(std::max<int64_t>(given.integer(0), 0)));
  return pad(self.text(), given.integer(0), fill[0], kWhere);
}

const std::map<std::string, Method, std::less<>>& string_methods() {
  static const std::map<std::string, Method, std::less<>> methods = {
      {"strip", strip_method<true, true>},
      {"lstrip", strip_method<true, false>},
      {"rstrip", strip_method<false, true>},
      {"split", split_method<false>},
      {"rsplit", split_method<true>},
      {"upper", change_method<upper>},
      {"lower", change_method<lower>},
      {"casefold", change_method<casefold>},
      {"capitalize", change_method<capitalize>},
      {"title", change_method<title>},
      {"swapcase", change_method<swapcase>},
      {"startswith", starts_method<false>},
      {"endswith", starts_method<true>},
      {"find", find_method<false, false>},
      {"rfind", find_method<true, false>},
      {"index", find_method<false, true>},
      {"rindex", find_method<true, true>},
      {"count", count_method},
      {"replace", replace_method},
      {"join", join_method},
      {"partition", partition_method<false>},
      {"rpartition", partition_method<true>},
      {"removeprefix", remove_method<false>},
      {"removesuffix", remove_method<true>},
      {"center", pad_method<'c'>},
      {"ljust", pad_method<'<'>},
      {"rjust", pad_method<'>'>},
      {"zfill", pad_method<'z'>},
      {"splitlines",
       [](const Value& self, const Args& args, Budget&) {
         const Arguments given("splitlines", args, {"keepends"});
         return strings(split_lines(self.text(), given.truth(0)));
       }},
      {"format", [](const Value& self, const Args& args,
                    Budget& budget) { return Value(format_braces(self.text(), args, budget)); }},
  };
  return methods;
}

// What strings that are marked safe give: such strings. Where they would escape their arguments,
// they are refused.
Value as_markup(const std::string& name, const Args& args, const Value& result) {
  if (!result.is_string() && !result.is_list() && !result.is_tuple()) return result;
  const bool text =
      !args.named.empty() || std::any_of(args.positional.begin(), args.positional.end(),
                                         [](const Value& one) { return !one.is_integer(); });
  if (text || !result.is_string())
    throw Error(concat("the method '", name, "' of safe strings is not supported"));
  return {result.text(), true};
}

Value index_method(const Value& self, const Args& args, Budget&) {
  const Arguments given("index", args, {"/value"}, 1);
  const Values& all = *self.sequence();
  for (size_t i = 0; i < all.size(); ++i) {
    if (equal(all[i], given.at(0))) return static_cast<int64_t>(i);
  }
  throw Error("the value is not in the list");
}

Value count_items(const Value& self, const Args& args, Budget&) {
  const Arguments given("count", args, {"/value"}, 1);
  int64_t count = 0;
  for (const Value& one : *self.sequence()) count += equal(one, given.at(0)) ? 1 : 0;
  return count;
}

Value get_method(const Value& self, const Args& args, Budget&) {
  const Arguments given("get", args, {"/key", "/default"}, 1);
  const Value* found = find(*self.dict(), given.at(0));
  return found != nullptr ? *found : given.has(1) ? given.at(1) : Value(None());
}

Value view(const Value& self, const std::string& name) {
  Values items;
  for (const auto& [key, value] : self.dict()->items) {
    items.push_back(name == "keys"     ? key
                    : name == "values" ? value
                                       : Value(Tuple{.items = {key, value}}));
  }
  return std::shared_ptr<Object>(std::make_shared<DictView>(name, std::move(items)));
}

template <size_t kSize>
bool is_one_of(const std::array<std::string_view, kSize>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

constexpr std::array<std::string_view, 5> kChangeDicts = {"clear", "pop", "popitem", "setdefault",
                                                          "update"};
constexpr std::array<std::string_view, 8> kChangeLists = {"append", "clear",  "extend",  "insert",
                                                          "pop",    "remove", "reverse", "sort"};
constexpr std::array<std::string_view, 6> kOfStrings = {"encode",       "expandtabs", "format_map",
                                                        "isidentifier", "maketrans",  "translate"};
constexpr std::array<std::string_view, 14> kOfNumbers = {
    "as_integer_ratio", "bit_count", "bit_length",  "conjugate", "denominator",
    "from_bytes",       "fromhex",   "from_number", "hex",       "imag",
    "is_integer",       "numerator", "real",        "to_bytes"};

[[noreturn]] void unsupported(const std::string& name, const Value& value) {
  throw Error(
      concat("the method '", name, "' of a ", value.type(), " is not supported in chat templates"));
}

}  // namespace

bool is_unsupported_method(std::string_view name) {
  return is_one_of(kOfStrings, name) || is_one_of(kOfNumbers, name) || name == "fromkeys";
}

std::optional<Value> method(const Value& value, const std::string& name, Budget& budget) {
  if (value.is_string()) {
    if (is_one_of(kOfStrings, name)) unsupported(name, value);
    if (ask(name, "").has_value()) {
      return function(name, [value, name](const Args& args) {
        const Arguments given(name, args, {});
        return *ask(name, value.text());
      });
    }
    const auto found = string_methods().find(name);
    if (found == string_methods().end()) return std::nullopt;
    return function(name, [value, name, body = found->second, &budget](const Args& args) {
      Value result = body(value, args, budget);
      return value.is_markup() ? as_markup(name, args, result) : result;
    });
  }
  const auto with = [&](Method body) {
    return function(name,
                    [value, body, &budget](const Args& args) { return body(value, args, budget); });
  };
  if (value.sequence() != nullptr) {
    if (value.is_group() && (name == "grouper" || name == "list"))
      return (*value.sequence())[name == "list" ? 1 : 0];
    if (name == "index") return with(index_method);
    if (name == "count") return with(count_items);
    if (value.is_list() && is_one_of(kChangeLists, name)) return unsafe(value, name);
    if (value.is_list() && name == "copy")
      return with([](const Value& self, const Args&, Budget&) { return self; });
    return std::nullopt;
  }
  if (value.dict() != nullptr) {
    if (name == "keys" || name == "values" || name == "items") {
      return function(name, [value, name](const Args& args) {
        const Arguments given(name, args, {});
        return view(value, name);
      });
    }
    if (name == "get") return with(get_method);
    if (name == "copy") return with([](const Value& self, const Args&, Budget&) { return self; });
    if (name == "fromkeys") unsupported(name, value);
    if (is_one_of(kChangeDicts, name)) return unsafe(value, name);
    return std::nullopt;
  }
  if (value.is_number() && is_one_of(kOfNumbers, name)) unsupported(name, value);
  return std::nullopt;
}

}  // namespace baton::engine::jinja
