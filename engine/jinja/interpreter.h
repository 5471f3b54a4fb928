// Rendering a parsed template.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "engine/jinja/operations.h"
#include "engine/jinja/syntax.h"

namespace baton::engine::jinja {

// Variables of a block, within those around it. A name may be there and unset: then it is
// undefined, whatever is around.
struct Scope {
  Scope* parent = nullptr;
  std::vector<std::pair<std::string, std::optional<Value>>> variables;
  bool kept = false;  // a macro or a loop refers to it: it lives as long as the rendering

  void set(const std::string& name, std::optional<Value> value);
};

// One rendering: made, run, and thrown away. Throws Error.
class Interpreter {
 public:
  using Variables = absl::flat_hash_map<std::string, Value>;
  explicit Interpreter(Variables variables);
  ~Interpreter();
  Interpreter(const Interpreter&) = delete;
  Interpreter& operator=(const Interpreter&) = delete;

  std::string run(const Syntax& syntax);
  std::string call_macro(const Statement& macro, Scope& around, const Args& args);

 private:
  enum class Flow { kOn, kBreak, kContinue };
  class Level;
  class Block;

  Flow execute(const Body& body, Scope& scope, std::string& out);
  Flow execute_one(const Statement& made, Scope& scope, std::string& out);
  void print(const Statement& made, Scope& scope, std::string& out);
  Flow capture(const Statement& made, Scope& scope, std::string& out);
  Flow loop(const Statement& made, const Value& iterable, Scope& around, std::string& out,
            int64_t depth);
  Value tested(const Statement& made, const Value& iterable, Scope& around);
  void assign(const Expression& target, const Value& value, Scope& scope);
  void keep(Scope& scope);

  Value evaluate(const Expression& node, Scope& scope);
  Value name(const std::string& name, const Scope& scope) const;
  Value filtered(const Expression& node, const Value& value, Scope& scope);
  Value compared(const Expression& node, Scope& scope);
  Value dictionary(const Expression& node, Scope& scope);
  Args arguments(const CallArguments& given, Scope& scope);

  Variables variables_;
  Budget budget_;
  int depth_ = 0;
  std::vector<std::unique_ptr<Scope>> kept_;
  std::vector<std::shared_ptr<Namespace>>
      namespaces_;  // emptied at the end: they may hold themselves
};

}  // namespace baton::engine::jinja
