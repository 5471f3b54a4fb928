// A parsed template.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/jinja/value.h"

namespace baton::engine::jinja {

struct Expression;
using ExpressionPtr = std::unique_ptr<Expression>;

struct CallArguments {
  std::vector<ExpressionPtr> positional;
  std::vector<std::pair<std::string, ExpressionPtr>> named;
  ExpressionPtr more_positional, more_named;  // *x and **x, or null
};

enum class ExpressionKind {
  kConstant,   // value
  kName,       // name; as a target, too
  kAttribute,  // parts[0].name; as a target of a namespace, parts is empty and `space` the
               // namespace's name
  kItem,       // parts[0][parts[1]]
  kSlice,      // parts[0][parts[1]:parts[2]:parts[3]], each of which may be null
  kCall,       // parts[0](arguments)
  kFilter,     // parts[0] | name(arguments); parts[0] is null in blocks
  kTest,       // parts[0] is name(arguments)
  kUnary,      // name: "-", "+", "not"
  kBinary,     // name: an operator of numbers and the like
  kAnd,
  kOr,
  kJoin,       // parts ~ ...
  kCompare,    // parts[0] names[0] parts[1] names[1] parts[2] ...
  kCondition,  // parts[0] if parts[1] else parts[2], which may be null
  kList,
  kTuple,
  kDict,  // keys and values in turn
};

struct Expression {
  ExpressionKind kind;
  int line = 0;
  int height = 1;  // of the tree below
  Value value;
  std::string name, space;
  std::vector<std::string> names;
  std::vector<ExpressionPtr> parts;
  CallArguments arguments;
};

struct Statement;
using Body = std::vector<Statement>;

enum class StatementKind {
  kText,      // text
  kPrint,     // expressions
  kIf,        // expressions[0], body, other
  kFor,       // target in expressions[0] (if test), body, other; recursive
  kSet,       // target = expressions[0]
  kSetBlock,  // target, body, through expressions[0], filters or null
  kWith,      // targets = expressions, body
  kFilter,    // expressions[0], body
  kMacro,     // text(parameters), body
  kCall,      // call(parameters) expressions[0], body
  kScope,     // body
  kBreak,
  kContinue,
};

struct Parameter {
  std::string name;
  ExpressionPtr value;  // the default, or null
};

struct Statement {
  StatementKind kind;
  int line = 0;
  std::string text;
  ExpressionPtr target, test;
  std::vector<ExpressionPtr> targets, expressions;
  std::vector<Parameter> parameters;
  bool recursive = false, takes_named = false, takes_positional = false, takes_caller = false;
  Body body, other;
  // Names that Jinja's compiler makes undefined where the scope of `body` or of `other` begins,
  // because it sees them assigned there before it sees them read.
  std::vector<std::string> unset, other_unset;
};

struct Syntax {
  Body body;
  std::vector<std::string> unset;
};

// Throws Error with the line of what is no template, and for what is Jinja and not supported.
Syntax parse(std::string_view source);

// Fills in what is `unset` (scopes.cc).
void find_unset(Syntax& syntax);

}  // namespace baton::engine::jinja
