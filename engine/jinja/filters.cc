// What stands behind "|": jinja2/filters.py, and transformers' tojson.
#include <algorithm>
#include <array>
#include <cmath>
#include <map>

#include "engine/jinja/arguments.h"
#include "engine/jinja/operations.h"
#include "engine/jinja/text.h"

namespace baton::engine::jinja {
namespace {

using Filter = Value (*)(const Value& value, const Args& args, Budget& budget);

constexpr std::array<std::string_view, 8> kRefused = {"filesizeformat", "pprint",    "random",
                                                      "striptags",      "urlencode", "urlize",
                                                      "wordwrap",       "xmlattr"};
constexpr std::array<std::string_view, 8> kTags = {"block", "extends",    "include", "import",
                                                   "from",  "autoescape", "trans",   "do"};

// soft_str(): strings stay what they are, safe or not.
Value soft(const Value& value) { return value.is_string() ? value : Value(value.str()); }

template <std::string (*kChange)(std::string_view)>
Value change_filter(const Value& value, const Args& args, Budget&) {
  const Arguments given("the filter", args, {});
  return {kChange(value.str()), value.is_markup()};
}

std::vector<std::string> split_at(const std::string& text, const std::string& mark) {
  return split(text, &mark, -1, false);
}

// Looks an attribute up by "a.b.0", or an index.
std::vector<Value> path_of(const Value& attribute) {
  if (attribute.is_none()) return {};
  if (!attribute.is_string()) return {attribute};
  std::vector<Value> path;
  for (const std::string& part : split_at(attribute.text(), ".")) {
    const bool digits = *ask("isdigit", part);
    path.push_back(digits ? Value(parse_integer(part, 10).value_or(0)) : Value(part));
  }
  return path;
}

Value follow(Value value, const std::vector<Value>& path, Budget& budget,
             const std::optional<Value>& fallback = {}) {
  for (const Value& part : path) {
    value = item(value, part, budget);
    if (fallback.has_value() && value.is_undefined()) value = *fallback;
  }
  return value;
}

// What things are sorted and grouped by: with small letters, unless case matters.
Value folded(const Value& value, bool case_sensitive) {
  return value.is_string() && !case_sensitive ? Value(lower(value.text())) : value;
}

Value title_filter(const Value& value, const Args& args, Budget&) {
  const Arguments given("title", args, {});
  std::string out;
  std::u32string word;
  const auto end_word = [&] {
    if (word.empty()) return;
    out += upper(narrow(word.substr(0, 1))) + lower(narrow(word.substr(1)));
    word.clear();
  };
  for (const char32_t c : wide(value.str())) {
    const bool between = is_space(c) || c == '-' || c == '(' || c == '{' || c == '[' || c == '<';
    if (between) end_word();
    if (between) {
      out += narrow(std::u32string_view(&c, 1));
    } else {
      word += c;
    }
  }
  end_word();
  return out;
}

Value trim_filter(const Value& value, const Args& args, Budget&) {
  const Arguments given("trim", args, {"chars"});
  if (!given.has_some(0)) return {strip(value.str(), nullptr, true, true), value.is_markup()};
  if (value.is_markup()) throw Error("trim(chars) of a safe string is not supported");
  const std::string characters = given.text(0);
  return strip(value.str(), &characters, true, true);
}

Value replace_filter(const Value& value, const Args& args, Budget& budget) {
  const Arguments given("replace", args, {"old", "new", "count"}, 2);
  std::string out = replace(value.str(), given.at(0).str(), given.at(1).str(),
                            given.has_some(2) ? given.integer(2) : -1);
  budget.take_text(out.size());
  return out;
}

Value join_filter(const Value& value, const Args& args, Budget& budget) {
  const Arguments given("join", args, {"d", "attribute"});
  const std::string between = given.has(0) ? given.at(0).str() : "";
  const std::vector<Value> path = path_of(given.has(1) ? given.at(1) : Value(None()));
  std::string out;
  bool first = true;
  Value one;
  for (const Next next = value.iterate(); next(one); first = false) {
    const std::string text = follow(one, path, budget).str();
    budget.take_text(text.size() + between.size());
    append(out, first ? "" : between, text);
  }
  budget.take_text(out.size());
  return out;
}

Value indent_filter(const Value& value, const Args& args, Budget& budget) {
  const Arguments given("indent", args, {"width", "first", "blank"});
  value.used();
  if (!value.is_string()) throw Error(concat("indent was given a ", value.type(), " for a string"));
  const bool text_width = given.has(0) && given.at(0).is_string();
  const int64_t width = text_width ? 0 : given.integer(0, 4);
  budget.take_text(static_cast<size_t>(std::max<int64_t>(width, 0)));
  const std::string indentation =
      text_width ? given.at(0).text()
                 : std::string(static_cast<size_t>(std::max<int64_t>(width, 0)), ' ');
  std::string out;
  bool first = true;
  for (const std::string& line : split_lines(value.text() + "\n", false)) {
    const bool indents = first ? given.truth(1) : given.truth(2) || !line.empty();
    append(out, first ? "" : "\n", indents ? indentation : "", line);
    budget.take_text(line.size() + indentation.size());
    first = false;
  }
  budget.take_text(out.size());
  return {out, value.is_markup()};
}

Value truncate_filter(const Value& value, const Args& args, Budget&) {
  const Arguments given("truncate", args, {"length", "killwords", "end", "leeway"});
  const int64_t length = given.integer(0, 255), leeway = given.has_some(3) ? given.integer(3) : 5;
  const std::string end = given.text(2, "...");
  if (length < count_characters(end) || leeway < 0)
    throw Error("truncate was given lengths that do not fit");
  if (value.length().has_value() && *value.length() <= length + leeway) return value;
  if (!value.is_string() || value.is_markup())
    throw Error(concat("truncate of a ", value.type(), " is not supported"));
  const std::u32string all = wide(value.text());
  std::string out = narrow(all.substr(0, static_cast<size_t>(length - count_characters(end))));
  if (!given.truth(1)) {
    const std::string space = " ";
    out = split(out, &space, 1, true)[0];
  }
  return out + end;
}

Value int_filter(const Value& value, const Args& args, Budget&) {
  const Arguments given("int", args, {"default", "base"});
  value.used();
  if (value.is_integer()) return value.integer();
  std::optional<double> number;
  if (value.is_number()) {
    if (std::isinf(value.number())) throw Error("cannot convert float infinity to integer");
    number = value.number();
  }
  if (value.is_string()) {
    if (const auto exact = parse_integer(value.text(), given.integer(1, 10))) return *exact;
    number = parse_float(value.text());
  }
  if (number.has_value() && std::isfinite(*number)) return truncated(*number);
  return given.has(0) ? given.at(0) : Value(int64_t{0});
}

Value float_filter(const Value& value, const Args& args, Budget&) {
  const Arguments given("float", args, {"default"});
  value.used();
  if (value.is_number()) return value.number();
  if (value.is_string()) {
    if (const auto number = parse_float(value.text())) return *number;
  }
  return given.has(0) ? given.at(0) : Value(0.0);
}

Value round_filter(const Value& value, const Args& args, Budget& budget) {
  const Arguments given("round", args, {"precision", "method"});
  const std::string how = given.text(1, "common");
  const int64_t digits = given.integer(0);
  value.used();
  if (!value.is_number()) throw Error(concat("a ", value.type(), " is not rounded"));
  if (how == "common") {
    if (!value.is_integer()) return rounded(value.number(), digits);
    if (digits >= 0) return value.integer();
    return truncated(rounded(value.number(), digits));
  }
  if (how != "ceil" && how != "floor") throw Error("method must be common, ceil or floor");
  const Value unit = binary("**", int64_t{10}, digits, budget);
  const double scaled = binary("*", value, unit, budget).number();
  return binary("/", truncated(how == "ceil" ? std::ceil(scaled) : std::floor(scaled)), unit,
                budget);
}

Value tojson_filter(const Value& value, const Args& args, Budget& budget) {
  const Arguments given("tojson", args, {"ensure_ascii", "indent", "separators", "sort_keys"});
  JsonStyle style{.ascii = given.truth(0), .sorted = given.truth(3), .indent = {}};
  if (given.has_some(1)) {
    const bool text = given.at(1).is_string();
    const int64_t width = text ? 0 : std::max<int64_t>(given.integer(1), 0);
    if (width > 1000) throw Error("tojson: the indentation is too wide");
    style.indent = text ? given.at(1).text() : std::string(static_cast<size_t>(width), ' ');
    style.comma = ",";
  }
  if (given.has_some(2)) {
    const Values* both = given.at(2).sequence();
    if (both == nullptr || both->size() != 2 || !(*both)[0].is_string() ||
        !(*both)[1].is_string()) {
      throw Error("tojson: separators are two strings");
    }
    style.comma = (*both)[0].text();
    style.colon = (*both)[1].text();
  }
  std::string out = to_json(value, style);
  budget.take_text(out.size());
  return out;
}

Value first_filter(const Value& value, const Args& args, Budget&) {
  const Arguments given("first", args, {});
  Value one;
  return value.iterate()(one) ? one : Value::undefined("No first item, sequence was empty.");
}

// Backwards; nothing where that cannot be.
Next backwards(const Value& value) {
  if (value.object() != nullptr) return value.object()->reversed();
  if (!value.is_undefined() && !value.length().has_value()) return nullptr;
  Values all = value.to_list();
  std::reverse(all.begin(), all.end());
  return next_of(std::move(all));
}

Value last_filter(const Value& value, const Args& args, Budget&) {
  const Arguments given("last", args, {});
  const Next next = backwards(value);
  if (next == nullptr) throw Error(concat("a ", value.type(), " is not reversible"));
  Value one;
  return next(one) ? one : Value::undefined("No last item, sequence was empty.");
}

Value reverse_filter(const Value& value, const Args& args, Budget&) {
  const Arguments given("reverse", args, {});
  if (value.is_string()) return slice(value, None(), None(), int64_t{-1});
  if (Next next = backwards(value)) return generator(std::move(next));
  Values all = value.to_list();
  std::reverse(all.begin(), all.end());
  return List{std::move(all)};
}

Value length_filter(const Value& value, const Args& args, Budget&) {
  const Arguments given("length", args, {});
  const std::optional<int64_t> length = value.length();
  if (!length.has_value()) throw Error(concat("a ", value.type(), " has no length"));
  return *length;
}

Value default_filter(const Value& value, const Args& args, Budget&) {
  const Arguments given("default", args, {"default_value", "boolean"});
  const bool falls_back = value.is_undefined() || (given.truth(1) && !value.truth());
  return !falls_back ? value : given.has(0) ? given.at(0) : Value("");
}

void sort_values(std::vector<std::pair<Value, Value>>& keyed, bool reverse, Budget& budget) {
  // A reversed order keeps what is equal in its order, too.
  if (reverse) std::reverse(keyed.begin(), keyed.end());
  std::stable_sort(keyed.begin(), keyed.end(), [&](const auto& a, const auto& b) {
    budget.take(1);
    return less(a.first, b.first);
  });
  if (reverse) std::reverse(keyed.begin(), keyed.end());
}

Value values_of(std::vector<std::pair<Value, Value>> keyed) {
  List list;
  for (auto& [key, value] : keyed) list.items.push_back(std::move(value));
  return list;
}

Value sort_filter(const Value& value, const Args& args, Budget& budget) {
  const Arguments given("sort", args, {"reverse", "case_sensitive", "attribute"});
  std::vector<std::vector<Value>> paths;
  if (given.has(2) && given.at(2).is_string()) {
    for (const std::string& one : split_at(given.at(2).text(), ",")) paths.push_back(path_of(one));
  } else {
    paths.push_back(path_of(given.has(2) ? given.at(2) : Value(None())));
  }
  std::vector<std::pair<Value, Value>> keyed;
  for (const Value& one : value.to_list()) {
    List key;
    for (const auto& path : paths)
      key.items.push_back(folded(follow(one, path, budget), given.truth(1)));
    keyed.emplace_back(std::move(key), one);
  }
  sort_values(keyed, given.truth(0), budget);
  return values_of(std::move(keyed));
}

Value dictsort_filter(const Value& value, const Args& args, Budget& budget) {
  const Arguments given("dictsort", args, {"case_sensitive", "by", "reverse"});
  const std::string by = given.text(1, "key");
  value.used();
  if (by != "key" && by != "value") throw Error("You can only sort by either \"key\" or \"value\"");
  if (value.dict() == nullptr) throw Error(concat("a ", value.type(), " has no items"));
  std::vector<std::pair<Value, Value>> keyed;
  for (const auto& [key, one] : value.dict()->items) {
    keyed.emplace_back(folded(by == "key" ? key : one, given.truth(0)), Tuple{.items = {key, one}});
  }
  sort_values(keyed, given.truth(2), budget);
  return values_of(std::move(keyed));
}

Value groupby_filter(const Value& value, const Args& args, Budget& budget) {
  const Arguments given("groupby", args, {"attribute", "default", "case_sensitive"}, 1);
  const std::vector<Value> path = path_of(given.at(0));
  const std::optional<Value> fallback =
      given.has_some(1) ? std::optional<Value>(given.at(1)) : std::nullopt;
  std::vector<std::pair<Value, Value>> keyed;
  for (const Value& one : value.to_list()) {
    keyed.emplace_back(folded(follow(one, path, budget, fallback), given.truth(2)), one);
  }
  sort_values(keyed, false, budget);
  List groups;
  for (size_t at = 0; at < keyed.size();) {
    List members;
    const Value key = keyed[at].first, name = follow(keyed[at].second, path, budget, fallback);
    for (; at < keyed.size() && equal(keyed[at].first, key); ++at)
      members.items.push_back(keyed[at].second);
    groups.items.emplace_back(
        Tuple{.items = {given.truth(2) ? key : name, std::move(members)}, .group = true});
  }
  return groups;
}

Value unique_filter(const Value& value, const Args& args, Budget& budget) {
  const Arguments given("unique", args, {"case_sensitive", "attribute"});
  const std::vector<Value> path = path_of(given.has(1) ? given.at(1) : Value(None()));
  return generator([value, source = Next(), seen = Dict(), path, exact = given.truth(0),
                    &budget](Value& out) mutable {
    if (source == nullptr) source = value.iterate();
    while (source(out)) {
      budget.take(static_cast<int64_t>(seen.items.size()) + 1);
      const Value key = folded(follow(out, path, budget), exact);
      if (find(seen, key) != nullptr) continue;
      seen.items.emplace_back(key, None());
      return true;
    }
    return false;
  });
}

template <bool kMost>
Value extreme_filter(const Value& value, const Args& args, Budget& budget) {
  const Arguments given(kMost ? "max" : "min", args, {"case_sensitive", "attribute"});
  const std::vector<Value> path = path_of(given.has(1) ? given.at(1) : Value(None()));
  const auto key_of = [&](const Value& one) {
    return folded(follow(one, path, budget), given.truth(0));
  };
  Value best, one;
  const Next next = value.iterate();
  if (!next(best)) return Value::undefined("No aggregated item, sequence was empty.");
  while (next(one)) {
    if (kMost ? less(key_of(best), key_of(one)) : less(key_of(one), key_of(best))) best = one;
  }
  return best;
}

Value sum_filter(const Value& value, const Args& args, Budget& budget) {
  const Arguments given("sum", args, {"attribute", "start"});
  const std::vector<Value> path = path_of(given.has(0) ? given.at(0) : Value(None()));
  Value sum = given.has(1) ? given.at(1) : Value(int64_t{0}), one;
  if (sum.is_string()) throw Error("sum() can't sum strings");
  for (const Next next = value.iterate(); next(one);)
    sum = binary("+", sum, follow(one, path, budget), budget);
  return sum;
}

Value list_filter(const Value& value, const Args& args, Budget& budget) {
  const Arguments given("list", args, {});
  List list{value.to_list()};
  budget.take(static_cast<int64_t>(list.items.size()));
  return list;
}

Value items_filter(const Value& value, const Args& args, Budget&) {
  const Arguments given("items", args, {});
  if (!value.is_undefined() && value.dict() == nullptr) {
    return generator(
        [](Value&) -> bool { throw Error("Can only get item pairs from a mapping."); });
  }
  return generator([value, at = size_t{0}](Value& out) mutable {
    if (value.is_undefined() || at == value.dict()->items.size()) return false;
    const auto& [key, one] = value.dict()->items[at++];
    out = Tuple{.items = {key, one}};
    return true;
  });
}

// A generator of what is made when it is first asked.
Value made_later(std::function<Values()> make) {
  return generator([make = std::move(make), rest = Next()](Value& out) mutable {
    if (rest == nullptr) rest = next_of(make());
    return rest(out);
  });
}

Value batch_filter(const Value& value, const Args& args, Budget&) {
  const Arguments given("batch", args, {"linecount", "fill_with"}, 1);
  return made_later([value, given] {
    const int64_t count = given.integer(0);
    Values batches;
    List batch;
    for (const Value& one : value.to_list()) {
      if (static_cast<int64_t>(batch.items.size()) == count) {
        batches.emplace_back(std::exchange(batch, {}));
      }
      batch.items.push_back(one);
    }
    if (batch.items.empty()) return batches;
    if (count > 100000) throw Error("batch: such long lines are not supported");
    while (given.has_some(1) && static_cast<int64_t>(batch.items.size()) < count)
      batch.items.push_back(given.at(1));
    batches.emplace_back(std::move(batch));
    return batches;
  });
}

Value slice_filter(const Value& value, const Args& args, Budget&) {
  const Arguments given("slice", args, {"slices", "fill_with"}, 1);
  return made_later([value, given] {
    const Values all = value.to_list();
    const int64_t slices = given.integer(0);
    if (slices <= 0 || slices > 100000) throw Error("slice: so many slices are not supported");
    const auto length = static_cast<int64_t>(all.size());
    Values out;
    for (int64_t i = 0, at = 0; i < slices; ++i) {
      List one;
      const bool extra = i < length % slices;
      const int64_t end = at + length / slices + (extra ? 1 : 0);
      for (; at < end; ++at) one.items.push_back(all[static_cast<size_t>(at)]);
      if (given.has_some(1) && !extra) one.items.push_back(given.at(1));
      out.emplace_back(std::move(one));
    }
    return out;
  });
}

// A generator over the items of what is true; what is false is empty, as in Jinja.
template <typename Step>
Value lazily(const Value& value, Step step) {
  if (!value.truth()) return generator([](Value&) { return false; });
  return generator([value, source = Next(), step](Value& out) mutable {
    if (source == nullptr) source = value.iterate();
    return step(source, out);
  });
}

Value map_filter(const Value& value, const Args& args, Budget& budget) {
  if (args.positional.empty()) {
    const Arguments given("map", args, {"/", "attribute", "default"});
    if (!given.has(1)) throw Error("map requires a filter argument");
    const std::optional<Value> fallback =
        given.has_some(2) ? std::optional<Value>(given.at(2)) : std::nullopt;
    return lazily(value,
                  [path = path_of(given.at(1)), fallback, &budget](const Next& source, Value& out) {
                    if (!source(out)) return false;
                    out = follow(out, path, budget, fallback);
                    return true;
                  });
  }
  Args rest = args;
  const Value name = rest.positional.front();
  rest.positional.erase(rest.positional.begin());
  return lazily(value, [name, rest, &budget](const Next& source, Value& out) {
    if (!source(out)) return false;
    if (!name.is_string()) throw Error(concat("No filter named ", name.repr(), "."));
    out = call_filter(name.text(), out, rest, budget);
    return true;
  });
}

template <bool kTakes, bool kByAttribute>
Value select_filter(const Value& value, const Args& args, Budget& budget) {
  Args rest = args;
  const auto next_argument = [&]() -> std::optional<Value> {
    if (rest.positional.empty()) return std::nullopt;
    Value first = rest.positional.front();
    rest.positional.erase(rest.positional.begin());
    return first;
  };
  std::vector<Value> path;
  if (kByAttribute) {
    const std::optional<Value> attribute = next_argument();
    if (!attribute.has_value()) throw Error("Missing parameter for attribute name");
    path = path_of(*attribute);
  }
  const std::optional<Value> name = next_argument();
  if (name.has_value() && !name->is_string())
    throw Error(concat("No test named ", name->repr(), "."));
  return lazily(value, [path, name, rest, &budget](const Next& source, Value& out) {
    while (source(out)) {
      const Value one = follow(out, path, budget);
      if ((name.has_value() ? call_test(name->text(), one, rest) : one.truth()) == kTakes)
        return true;
    }
    return false;
  });
}

const std::map<std::string, Filter, std::less<>>& filters() {
  static const std::map<std::string, Filter, std::less<>> all = {
      {"abs",
       [](const Value& value, const Args& args, Budget&) {
         const Arguments given("abs", args, {});
         if (!value.is_number()) throw Error(concat("bad operand type for abs(): ", value.type()));
         const bool below =
             value.number() < 0 || (value.is<double>() && std::signbit(value.number()));
         return below ? negative(value) : value.is_integer() ? Value(value.integer()) : value;
       }},
      {"attr",
       [](const Value& value, const Args& args, Budget& budget) {
         const Arguments given("attr", args, {"name"}, 1);
         value.used();
         const std::string name = given.text(0);
         // What a dictionary has under that key is no attribute.
         const Value plain = value.dict() != nullptr ? Value(Dict()) : value;
         Value found = attribute(plain, name, budget);
         return found.is_undefined() || value.dict() == nullptr ? found
                                                                : attribute(value, name, budget);
       }},
      {"batch", batch_filter},
      {"capitalize", change_filter<capitalize>},
      {"center",
       [](const Value& value, const Args& args, Budget& budget) {
         const Arguments given("center", args, {"width"});
         budget.take_text(static_cast<size_t>(std::max<int64_t>(given.integer(0, 80), 0)));
         return Value(pad(value.str(), given.integer(0, 80), ' ', 'c'), value.is_markup());
       }},
      {"count", length_filter},
      {"d", default_filter},
      {"default", default_filter},
      {"dictsort", dictsort_filter},
      {"e",
       [](const Value& value, const Args&, Budget&) {
         return value.is_markup() ? value : Value(escape_html(value.str()), true);
       }},
      {"escape",
       [](const Value& value, const Args&, Budget&) {
         return value.is_markup() ? value : Value(escape_html(value.str()), true);
       }},
      {"first", first_filter},
      {"float", float_filter},
      {"forceescape", [](const Value& value, const Args&,
                         Budget&) { return Value(escape_html(value.str()), true); }},
      {"format",
       [](const Value& value, const Args& args, Budget& budget) {
         if (value.is_markup()) throw Error("format of a safe string is not supported");
         if (!args.positional.empty() && !args.named.empty()) {
           throw Error("can't handle positional and keyword arguments at the same time");
         }
         if (args.named.empty())
           return Value(format_percent(value.str(), Tuple{.items = args.positional}, budget));
         Dict named;
         for (const auto& [name, one] : args.named) put(named, name, one);
         return Value(format_percent(value.str(), named, budget));
       }},
      {"groupby", groupby_filter},
      {"indent", indent_filter},
      {"int", int_filter},
      {"items", items_filter},
      {"join", join_filter},
      {"last", last_filter},
      {"length", length_filter},
      {"list", list_filter},
      {"lower", change_filter<lower>},
      {"map", map_filter},
      {"max", extreme_filter<true>},
      {"min", extreme_filter<false>},
      {"reject", select_filter<false, false>},
      {"rejectattr", select_filter<false, true>},
      {"replace", replace_filter},
      {"reverse", reverse_filter},
      {"round", round_filter},
      {"safe", [](const Value& value, const Args&, Budget&) { return Value(value.str(), true); }},
      {"select", select_filter<true, false>},
      {"selectattr", select_filter<true, true>},
      {"slice", slice_filter},
      {"sort", sort_filter},
      {"string", [](const Value& value, const Args&, Budget&) { return soft(value); }},
      {"sum", sum_filter},
      {"title", title_filter},
      {"tojson", tojson_filter},
      {"trim", trim_filter},
      {"truncate", truncate_filter},
      {"unique", unique_filter},
      {"upper", change_filter<upper>},
      {"wordcount",
       [](const Value& value, const Args&, Budget&) {
         int64_t words = 0;
         bool inside = false;
         for (const char32_t c : wide(value.str())) {
           words += is_word(c) && !inside ? 1 : 0;
           inside = is_word(c);
         }
         return Value(words);
       }},
  };
  return all;
}

}  // namespace

bool knows_filter(std::string_view name) { return filters().contains(name); }
bool is_jinja_filter(std::string_view name) {
  return knows_filter(name) || std::find(kRefused.begin(), kRefused.end(), name) != kRefused.end();
}
bool is_jinja_tag(std::string_view name) {
  return std::find(kTags.begin(), kTags.end(), name) != kTags.end();
}

Value call_filter(const std::string& name, const Value& value, const Args& args, Budget& budget) {
  const auto found = filters().find(name);
  if (found == filters().end()) {
    throw Error(is_jinja_filter(name)
                    ? concat("the filter '", name, "' is not supported in chat templates")
                    : concat("No filter named '", name, "'."));
  }
  budget.take(1);
  return found->second(value, args, budget);
}

}  // namespace baton::engine::jinja
