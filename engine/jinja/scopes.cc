// Where Jinja's compiler takes a name for a local variable before anything is assigned to it: what
// jinja2/idtracking.py finds out, as far as templates can tell.
#include <set>

#include "engine/jinja/syntax.h"

namespace baton::engine::jinja {
namespace {

struct Symbols {
  const Symbols* parent = nullptr;
  std::set<std::string> known, unset, stored;

  bool finds(const std::string& name) const {
    return known.contains(name) || (parent != nullptr && parent->finds(name));
  }
  void load(const std::string& name) {
    if (!finds(name)) known.insert(name);
  }
  void store(const std::string& name) {
    stored.insert(name);
    if (known.contains(name)) return;
    if (parent == nullptr || !parent->finds(name)) unset.insert(name);
    known.insert(name);
  }
};

void read(Symbols& symbols, const ExpressionPtr& node) {
  if (node == nullptr) return;
  if (node->kind == ExpressionKind::kName) symbols.load(node->name);
  for (const auto& part : node->parts) read(symbols, part);
  for (const auto& part : node->arguments.positional) read(symbols, part);
  for (const auto& [name, part] : node->arguments.named) read(symbols, part);
  read(symbols, node->arguments.more_positional);
  read(symbols, node->arguments.more_named);
}

void assign(Symbols& symbols, const ExpressionPtr& target, bool parameter) {
  if (target->kind == ExpressionKind::kAttribute) {
    symbols.load(target->space);
  } else if (target->kind == ExpressionKind::kName && parameter) {
    symbols.known.insert(target->name);
  } else if (target->kind == ExpressionKind::kName) {
    symbols.store(target->name);
  }
  for (const auto& part : target->parts) assign(symbols, part, parameter);
}

void visit(Symbols& symbols, const Body& body);

// The branches of an `if` are looked at one by one, each from where it begins.
void visit_branches(Symbols& symbols, const Statement& made) {
  read(symbols, made.expressions[0]);
  Symbols first = symbols, second = symbols;
  visit(first, made.body);
  visit(second, made.other);
  std::set<std::string> stored;
  for (const Symbols* branch : {&first, &second}) {
    for (const std::string& name : branch->stored) {
      if (!symbols.stored.contains(name)) stored.insert(name);
    }
  }
  for (const Symbols* branch : {&first, &second}) {
    symbols.known.insert(branch->known.begin(), branch->known.end());
    symbols.unset.insert(branch->unset.begin(), branch->unset.end());
    symbols.stored.insert(branch->stored.begin(), branch->stored.end());
  }
  for (const std::string& name : stored) symbols.unset.erase(name);
}

// What statements say of the scope that they are in.
void visit(Symbols& symbols, const Body& body) {
  for (const Statement& made : body) {
    if (made.kind == StatementKind::kIf) {
      visit_branches(symbols, made);
      continue;
    }
    for (const auto& one : made.expressions) read(symbols, one);
    if (made.kind == StatementKind::kMacro) symbols.store(made.text);
    if (made.kind == StatementKind::kSet || made.kind == StatementKind::kSetBlock) {
      assign(symbols, made.target, false);
    }
  }
}

void descend(const Symbols& symbols, Body& body);

// A scope within `outer`: what is assigned there before its body, and the scopes in it.
template <typename Begin>
std::vector<std::string> inner(const Symbols& outer, Body& body, Begin begin) {
  Symbols symbols{.parent = &outer};
  begin(symbols);
  visit(symbols, body);
  descend(symbols, body);
  return {symbols.unset.begin(), symbols.unset.end()};
}

void descend(const Symbols& symbols, Body& body) {
  for (Statement& made : body) {
    switch (made.kind) {
      case StatementKind::kText:
      case StatementKind::kPrint:
      case StatementKind::kSet:
      case StatementKind::kBreak:
      case StatementKind::kContinue:
        break;
      case StatementKind::kIf:
        descend(symbols, made.body);
        descend(symbols, made.other);
        break;
      case StatementKind::kFor:
        made.unset = inner(symbols, made.body, [&](Symbols& own) {
          own.known.insert("loop");
          assign(own, made.target, true);
        });
        made.other_unset = inner(symbols, made.other, [](Symbols&) {});
        break;
      default:
        made.unset = inner(symbols, made.body, [&](Symbols& own) {
          for (const auto& target : made.targets) assign(own, target, true);
          if (made.takes_caller) own.known.insert("caller");
          if (made.takes_named) own.known.insert("kwargs");
          if (made.takes_positional) own.known.insert("varargs");
          for (const auto& one : made.parameters) own.known.insert(one.name);
          for (const auto& one : made.parameters) read(own, one.value);
        });
    }
  }
}

// Whether a macro's body reads a name that nothing in it assigns first, wherever it does.
bool reads(const Body& body, const std::string& name) {
  Symbols symbols;
  for (const Statement& made : body) {
    for (const auto& one : made.expressions) read(symbols, one);
    read(symbols, made.test);
    for (const auto& one : made.parameters) read(symbols, one.value);
    if (reads(made.body, name) || reads(made.other, name)) return true;
  }
  return symbols.known.contains(name);
}

void find_special(Body& body) {
  for (Statement& made : body) {
    if (made.kind == StatementKind::kMacro || made.kind == StatementKind::kCall) {
      const auto given = [&](const char* name) {
        for (const auto& one : made.parameters) {
          if (one.name == name) return true;
        }
        return false;
      };
      made.takes_caller = reads(made.body, "caller") && !given("caller");
      made.takes_named = reads(made.body, "kwargs") && !given("kwargs");
      made.takes_positional = reads(made.body, "varargs") && !given("varargs");
    }
    find_special(made.body);
    find_special(made.other);
  }
}

}  // namespace

void find_unset(Syntax& syntax) {
  find_special(syntax.body);
  Symbols root;
  visit(root, syntax.body);
  descend(root, syntax.body);
  syntax.unset.assign(root.unset.begin(), root.unset.end());
}

}  // namespace baton::engine::jinja
