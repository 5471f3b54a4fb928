// Statements and expressions of a template, one after the other.
#include "engine/jinja/interpreter.h"

#include <algorithm>

#include "engine/jinja/arguments.h"
#include "engine/jinja/loop.h"

namespace baton::engine::jinja {
namespace {

constexpr int kDeepestRendering = 1000;

// A macro, and what {% call %} hands to one as `caller`.
class Macro : public Object {
 public:
  Macro(Interpreter* interpreter, const Statement* macro, Scope* around)
      : interpreter_(interpreter), macro_(macro), around_(around) {}
  std::string type() const override { return "macro"; }
  std::string repr() const override {
    return macro_->kind == StatementKind::kMacro ? "<Macro " + Value(macro_->text).repr() + ">"
                                                 : "<Macro 'caller'>";
  }
  std::optional<Value> attribute(const std::string& name) override {
    if (name == "name" && macro_->kind == StatementKind::kMacro) return Value(macro_->text);
    if (name == "arguments" || name == "catch_kwargs" || name == "catch_varargs" ||
        name == "caller") {
      throw Error(concat("the attribute '", name, "' of a macro is not supported"));
    }
    return std::nullopt;
  }
  bool callable() const override { return true; }
  Value call(const Args& args) override {
    return interpreter_->call_macro(*macro_, *around_, args);
  }

 private:
  Interpreter* interpreter_;
  const Statement* macro_;
  Scope* around_;
};

// As transformers: a namespace takes no names with an underscore before them.
void check_attribute(const Value& name) {
  if (name.is_string() && name.text().starts_with('_')) {
    throw Error("chat templates cannot store underscore-prefixed attributes on a namespace");
  }
}

Value undefined_name(const std::string& name) {
  return Value::undefined(concat("'", name, "' is undefined"));
}

}  // namespace

class Interpreter::Level {
 public:
  explicit Level(Interpreter* interpreter) : interpreter_(interpreter) {
    if (interpreter_->depth_ >= kDeepestRendering) throw Error("maximum recursion depth exceeded");
    ++interpreter_->depth_;
    interpreter_->budget_.take(1);
  }
  ~Level() { --interpreter_->depth_; }
  Level(const Level&) = delete;
  Level& operator=(const Level&) = delete;

 private:
  Interpreter* interpreter_;
};

// A scope for as long as its block runs, and longer if it is kept.
class Interpreter::Block {
 public:
  Block(Interpreter* interpreter, Scope* around, const std::vector<std::string>& unset)
      : interpreter_(interpreter), scope_(std::make_unique<Scope>()) {
    scope_->parent = around;
    clear(unset);
  }
  ~Block() {
    if (scope_->kept) interpreter_->kept_.push_back(std::move(scope_));
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  void clear(const std::vector<std::string>& unset) {
    scope_->variables.clear();
    for (const std::string& name : unset) scope_->variables.emplace_back(name, std::nullopt);
  }
  Scope& scope() { return *scope_; }

 private:
  Interpreter* interpreter_;
  std::unique_ptr<Scope> scope_;
};

void Scope::set(const std::string& name, std::optional<Value> value) {
  for (auto& [one, there] : variables) {
    if (one == name) {
      there = std::move(value);
      return;
    }
  }
  variables.emplace_back(name, std::move(value));
}

Interpreter::Interpreter(Variables variables) {
  const auto add = [&](const char* name, Function::Body body) {
    variables_[name] = function(name, std::move(body));
  };
  add("range", [](const Args& args) -> Value {
    const Arguments given("range", args, {"/start", "/stop", "/step"}, 1);
    const bool both = given.has(1);
    return std::shared_ptr<Object>(std::make_shared<Range>(
        both ? given.integer(0) : 0, given.integer(both ? 1 : 0), given.integer(2, 1)));
  });
  const auto dictionary_of = [](const Args& args) {
    const Arguments given("dict", {args.positional, {}}, {"/mapping"});
    Dict dict;
    if (given.has(0) && given.at(0).dict() != nullptr) {
      dict = *given.at(0).dict();
    } else if (given.has(0)) {
      for (const Value& one : given.at(0).to_list()) {
        const Values pair = one.to_list();
        if (pair.size() != 2) throw Error("dict() was given what is no pair");
        put(dict, pair[0], pair[1]);
      }
    }
    for (const auto& [name, value] : args.named) put(dict, name, value);
    return dict;
  };
  add("dict", [dictionary_of](const Args& args) { return Value(dictionary_of(args)); });
  add("namespace", [this, dictionary_of](const Args& args) -> Value {
    auto made = std::make_shared<Namespace>();
    made->attributes = dictionary_of(args);
    for (const auto& [name, value] : made->attributes.items) check_attribute(name);
    namespaces_.push_back(made);
    return std::shared_ptr<Object>(made);
  });
  add("cycler", [](const Args& args) -> Value {
    return std::shared_ptr<Object>(std::make_shared<Cycler>(args));
  });
  add("joiner", [](const Args& args) -> Value {
    const Arguments given("joiner", args, {"sep"});
    const Value separator = given.has(0) ? given.at(0) : Value(", ");
    return function("joiner", [separator, used = false](const Args&) mutable {
      return std::exchange(used, true) ? separator : Value("");
    });
  });
  for (auto& [name, value] : variables) variables_[name] = std::move(value);
}

Interpreter::~Interpreter() {
  for (const auto& one : namespaces_) one->attributes.items.clear();
}

std::string Interpreter::run(const Syntax& syntax) {
  Block block(this, nullptr, syntax.unset);
  keep(block.scope());
  std::string out;
  execute(syntax.body, block.scope(), out);
  return out;
}

void Interpreter::keep(Scope& scope) {
  for (Scope* one = &scope; one != nullptr && !one->kept; one = one->parent) one->kept = true;
}

Interpreter::Flow Interpreter::execute(const Body& body, Scope& scope, std::string& out) {
  for (const Statement& made : body) {
    const Flow flow = execute_one(made, scope, out);
    if (flow != Flow::kOn) return flow;
  }
  return Flow::kOn;
}

Interpreter::Flow Interpreter::execute_one(const Statement& made, Scope& scope, std::string& out) {
  const Level level(this);
  switch (made.kind) {
    case StatementKind::kText:
      budget_.take_text(made.text.size());
      out += made.text;
      break;
    case StatementKind::kPrint:
      print(made, scope, out);
      break;
    case StatementKind::kIf:
      return execute(evaluate(*made.expressions[0], scope).truth() ? made.body : made.other, scope,
                     out);
    case StatementKind::kFor:
      return loop(made, evaluate(*made.expressions[0], scope), scope, out, 0);
    case StatementKind::kSet:
      assign(*made.target, evaluate(*made.expressions[0], scope), scope);
      break;
    case StatementKind::kSetBlock:
    case StatementKind::kFilter:
      return capture(made, scope, out);
    case StatementKind::kWith: {
      Block block(this, &scope, made.unset);
      for (size_t i = 0; i < made.targets.size(); ++i) {
        assign(*made.targets[i], evaluate(*made.expressions[i], scope), block.scope());
      }
      return execute(made.body, block.scope(), out);
    }
    case StatementKind::kScope: {
      Block block(this, &scope, made.unset);
      return execute(made.body, block.scope(), out);
    }
    case StatementKind::kMacro:
      keep(scope);
      scope.set(made.text,
                Value(std::shared_ptr<Object>(std::make_shared<Macro>(this, &made, &scope))));
      break;
    case StatementKind::kCall: {
      keep(scope);
      const Expression& call_of = *made.expressions[0];
      const Value called = evaluate(*call_of.parts[0], scope);
      Args args = arguments(call_of.arguments, scope);
      args.named.emplace_back(
          "caller", Value(std::shared_ptr<Object>(std::make_shared<Macro>(this, &made, &scope))));
      out += call(called, args).str();
      break;
    }
    case StatementKind::kBreak:
      return Flow::kBreak;
    case StatementKind::kContinue:
      return Flow::kContinue;
  }
  return Flow::kOn;
}

void Interpreter::print(const Statement& made, Scope& scope, std::string& out) {
  for (const auto& one : made.expressions) {
    const std::string text = evaluate(*one, scope).str();
    budget_.take_text(text.size());
    out += text;
  }
}

// {% set x %}text{% endset %} and {% filter f %}text{% endfilter %}.
Interpreter::Flow Interpreter::capture(const Statement& made, Scope& scope, std::string& out) {
  Block block(this, &scope, made.unset);
  std::string text;
  const Flow flow = execute(made.body, block.scope(), text);
  if (flow != Flow::kOn) return flow;
  Value value(std::move(text));
  if (made.expressions[0] != nullptr) value = filtered(*made.expressions[0], value, block.scope());
  if (made.kind == StatementKind::kSetBlock) {
    assign(*made.target, value, scope);
  } else {
    out += value.str();
  }
  return Flow::kOn;
}

// The iterable through the loop's `if`, which is asked when an item's turn comes.
Value Interpreter::tested(const Statement& made, const Value& iterable, Scope& around) {
  keep(around);
  return generator([this, &made, &around, next = iterable.iterate()](Value& out) {
    while (next(out)) {
      const Level level(this);
      Block block(this, &around, {});
      assign(*made.target, out, block.scope());
      if (evaluate(*made.test, block.scope()).truth()) return true;
    }
    return false;
  });
}

// What its `else` does is the flow of the block around it.
Interpreter::Flow Interpreter::loop(const Statement& made, const Value& iterable, Scope& around,
                                    std::string& out, int64_t depth) {
  const Level level(this);
  const Value source = made.test != nullptr ? tested(made, iterable, around) : iterable;
  std::function<Value(const Value&)> recurse;
  if (made.recursive) {
    keep(around);
    recurse = [this, &made, &around, depth](const Value& inner) {
      std::string text;
      loop(made, inner, around, text, depth + 1);
      return Value(std::move(text));
    };
  }
  const auto state = std::make_shared<Loop>(source, std::move(recurse), depth);
  Block block(this, &around, made.unset);
  bool empty = true;
  for (Value one; state->advance(one);) {
    budget_.take(1);
    block.clear(made.unset);
    block.scope().set("loop", Value(std::shared_ptr<Object>(state)));
    assign(*made.target, one, block.scope());
    const Flow flow = execute(made.body, block.scope(), out);
    if (flow == Flow::kBreak) break;
    // Jinja takes a loop for empty until a round of it has come to its end.
    empty &= flow != Flow::kOn;
  }
  block.clear({});
  state->forget();
  if (!empty) return Flow::kOn;
  Block other(this, &around, made.other_unset);
  return execute(made.other, other.scope(), out);
}

void Interpreter::assign(const Expression& target, const Value& value, Scope& scope) {
  if (target.kind == ExpressionKind::kName) {
    scope.set(target.name, value);
    return;
  }
  if (target.kind == ExpressionKind::kAttribute) {
    auto* space = dynamic_cast<Namespace*>(name(target.space, scope).object());
    if (space == nullptr) throw Error("cannot assign attribute on non-namespace object");
    check_attribute(target.name);
    put(space->attributes, target.name, value);
    return;
  }
  const Values all = value.to_list();
  if (all.size() != target.parts.size()) {
    throw Error(
        concat("cannot unpack ", all.size(), " values into ", target.parts.size(), " names"));
  }
  for (size_t i = 0; i < all.size(); ++i) assign(*target.parts[i], all[i], scope);
}

std::string Interpreter::call_macro(const Statement& macro, Scope& around, const Args& args) {
  const Level level(this);
  const std::string label =
      macro.kind == StatementKind::kMacro ? concat("macro '", macro.text, "'") : "caller";
  auto named = args.named;
  const auto take = [&](const std::string& name) -> std::optional<Value> {
    const auto found = std::find_if(named.begin(), named.end(),
                                    [&](const auto& one) { return one.first == name; });
    if (found == named.end()) return std::nullopt;
    Value value = found->second;
    named.erase(found);
    return value;
  };
  Block block(this, &around, macro.unset);
  Scope& scope = block.scope();
  const size_t places = macro.parameters.size(), given = std::min(args.positional.size(), places);
  for (size_t i = 0; i < places; ++i) {
    scope.set(macro.parameters[i].name,
              i < given ? args.positional[i] : take(macro.parameters[i].name));
  }
  if (macro.takes_caller) {
    const std::optional<Value> caller = take("caller");
    scope.set("caller", caller.has_value() && !caller->is_none()
                            ? *caller
                            : Value::undefined("No caller defined"));
  }
  if (macro.takes_named) {
    Dict rest;
    for (const auto& [name, value] : named) put(rest, name, value);
    scope.set("kwargs", Value(std::move(rest)));
  } else if (!named.empty()) {
    throw Error(concat(label, " takes no keyword argument '", named[0].first, "'"));
  }
  if (macro.takes_positional) {
    const auto rest = args.positional.begin() + static_cast<long>(given);
    scope.set("varargs", Value(Tuple{.items = Values(rest, args.positional.end())}));
  } else if (args.positional.size() > places) {
    throw Error(concat(label, " takes not more than ", places, " argument(s)"));
  }
  for (const auto& [name, fallback] : macro.parameters) {
    const auto found =
        std::find_if(scope.variables.begin(), scope.variables.end(),
                     [&wanted = name](const auto& one) { return one.first == wanted; });
    if (found->second.has_value()) continue;
    const Value value = fallback != nullptr
                            ? evaluate(*fallback, scope)
                            : Value::undefined(concat("parameter '", name, "' was not provided"));
    scope.set(name, value);
  }
  std::string out;
  execute(macro.body, scope, out);
  return out;
}

Value Interpreter::name(const std::string& name, const Scope& scope) const {
  for (const Scope* one = &scope; one != nullptr; one = one->parent) {
    for (const auto& [there, value] : one->variables) {
      if (there == name) return value.has_value() ? *value : undefined_name(name);
    }
  }
  const auto found = variables_.find(name);
  return found != variables_.end() ? found->second : undefined_name(name);
}

Value Interpreter::evaluate(const Expression& node, Scope& scope) {
  const Level level(this);
  const auto part = [&](size_t i) { return evaluate(*node.parts[i], scope); };
  const auto optional = [&](size_t i) {
    return node.parts[i] != nullptr ? part(i) : Value(None());
  };
  switch (node.kind) {
    case ExpressionKind::kConstant:
      return node.value;
    case ExpressionKind::kName:
      return name(node.name, scope);
    case ExpressionKind::kAttribute:
      return attribute(part(0), node.name, budget_);
    case ExpressionKind::kItem: {
      const Value value = part(0);
      return item(value, part(1), budget_);
    }
    case ExpressionKind::kSlice: {
      const Value value = part(0), start = optional(1), stop = optional(2);
      Value out = slice(value, start, stop, optional(3));
      budget_.take(1 + (out.is_string() ? static_cast<int64_t>(out.text().size() / 256)
                                        : out.length().value_or(0)));
      return out;
    }
    case ExpressionKind::kCall: {
      const Value called = part(0);
      return call(called, arguments(node.arguments, scope));
    }
    case ExpressionKind::kFilter:
      return filtered(node, Value(), scope);
    case ExpressionKind::kTest: {
      const Value value = part(0);
      return call_test(node.name, value, arguments(node.arguments, scope));
    }
    case ExpressionKind::kUnary: {
      const Value value = part(0);
      if (node.name == "not") return !value.truth();
      return node.name == "-" ? negative(value) : negative(negative(value));
    }
    case ExpressionKind::kBinary: {
      const Value left = part(0);
      return binary(node.name, left, part(1), budget_);
    }
    case ExpressionKind::kAnd: {
      Value left = part(0);
      return left.truth() ? part(1) : left;
    }
    case ExpressionKind::kOr: {
      Value left = part(0);
      return left.truth() ? left : part(1);
    }
    case ExpressionKind::kJoin: {
      std::string out;
      for (size_t i = 0; i < node.parts.size(); ++i) out += part(i).str();
      budget_.take_text(out.size());
      return out;
    }
    case ExpressionKind::kCompare:
      return compared(node, scope);
    case ExpressionKind::kCondition:
      if (part(1).truth()) return part(0);
      if (node.parts[2] != nullptr) return part(2);
      return Value::undefined(concat("the inline if-expression on line ", node.line,
                                     " evaluated to false and no else section was defined."));
    case ExpressionKind::kList:
    case ExpressionKind::kTuple: {
      Values items;
      for (size_t i = 0; i < node.parts.size(); ++i) items.push_back(part(i));
      return node.kind == ExpressionKind::kList ? Value(List{std::move(items)})
                                                : Value(Tuple{.items = std::move(items)});
    }
    case ExpressionKind::kDict:
      break;
  }
  return dictionary(node, scope);
}

Value Interpreter::dictionary(const Expression& node, Scope& scope) {
  Dict dict;
  for (size_t i = 0; i < node.parts.size(); i += 2) {
    const Value key = evaluate(*node.parts[i], scope);
    put(dict, key, evaluate(*node.parts[i + 1], scope));
  }
  return dict;
}

Value Interpreter::compared(const Expression& node, Scope& scope) {
  Value left = evaluate(*node.parts[0], scope);
  for (size_t i = 0; i < node.names.size(); ++i) {
    Value right = evaluate(*node.parts[i + 1], scope);
    if (!compare(node.names[i], left, right)) return false;
    left = std::move(right);
  }
  return true;
}

// A filter of an expression, or in a block of what it captured.
Value Interpreter::filtered(const Expression& node, const Value& captured, Scope& scope) {
  const Level level(this);
  const Expression* inner = node.parts[0].get();
  const Value value = inner == nullptr                         ? captured
                      : inner->kind == ExpressionKind::kFilter ? filtered(*inner, captured, scope)
                                                               : evaluate(*inner, scope);
  return call_filter(node.name, value, arguments(node.arguments, scope), budget_);
}

Args Interpreter::arguments(const CallArguments& given, Scope& scope) {
  Args args;
  for (const auto& one : given.positional) args.positional.push_back(evaluate(*one, scope));
  for (const auto& [name, one] : given.named) args.named.emplace_back(name, evaluate(*one, scope));
  if (given.more_positional != nullptr) {
    for (const Value& one : evaluate(*given.more_positional, scope).to_list())
      args.positional.push_back(one);
  }
  if (given.more_named != nullptr) {
    const Value more = evaluate(*given.more_named, scope);
    if (more.dict() == nullptr) throw Error("what stands behind ** is no mapping");
    for (const auto& [name, one] : more.dict()->items) {
      if (!name.is_string()) throw Error("keywords must be strings");
      args.named.emplace_back(name.text(), one);
    }
  }
  return args;
}

}  // namespace baton::engine::jinja
