// A template's tokens as a tree: jinja2/parser.py, without inheritance and imports.
#include <algorithm>
#include <array>
#include <initializer_list>

#include "absl/strings/str_format.h"
#include "engine/jinja/lexer.h"
#include "engine/jinja/operations.h"
#include "engine/jinja/syntax.h"

namespace baton::engine::jinja {
namespace {

constexpr int kHighest = 200;      // of an expression's tree
constexpr int kDeepestTags = 200;  // tags in tags, brackets in brackets

class Parser {
 public:
  explicit Parser(std::string_view source) : tokens_(tokenize(source)) {}

  Syntax run() {
    Syntax syntax;
    syntax.body = body({});
    find_unset(syntax);
    return syntax;
  }

 private:
  using Names = std::initializer_list<std::string_view>;

  // What counts levels for as long as it lives.
  class Level {
   public:
    explicit Level(Parser* parser) : parser_(parser) {
      if (++parser_->depth_ > kDeepestTags) parser_->fail("the template is nested too deeply");
    }
    ~Level() { --parser_->depth_; }
    Level(const Level&) = delete;
    Level& operator=(const Level&) = delete;

   private:
    Parser* parser_;
  };

  [[noreturn]] void fail(std::string_view what) const { fail_at(token().line, what); }
  [[noreturn]] static void fail_at(int line, std::string_view what) {
    throw Error(absl::StrFormat("line %d: %s", line, what));
  }

  const Token& token() const { return tokens_[at_]; }
  const Token& look() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  Token next() {
    Token one = token();
    if (at_ + 1 < tokens_.size()) ++at_;
    return one;
  }
  bool is(TokenKind kind) const { return token().kind == kind; }
  static bool is_operator(const Token& one, std::string_view text) {
    return one.kind == TokenKind::kOperator && one.text == text;
  }
  bool is_operator(std::string_view text) const { return is_operator(token(), text); }
  static bool is_name(const Token& one, std::string_view text) {
    return one.kind == TokenKind::kName && one.text == text;
  }
  bool is_name(std::string_view text) const { return is_name(token(), text); }
  bool is_one_of(Names names) const {
    return std::any_of(names.begin(), names.end(), [&](auto name) { return is_name(name); });
  }
  bool skip_operator(std::string_view text) { return is_operator(text) && (next(), true); }
  bool skip_name(std::string_view text) { return is_name(text) && (next(), true); }
  std::string seen() const {
    switch (token().kind) {
      case TokenKind::kEnd:
        return "end of template";
      case TokenKind::kBlockEnd:
        return "end of statement block";
      case TokenKind::kVariableEnd:
        return "end of print statement";
      default:
        return token().text.empty() ? token().number.str() : token().text;
    }
  }
  void expect_operator(std::string_view text) {
    if (!skip_operator(text)) fail(concat("expected token '", text, "', got '", seen(), "'"));
  }
  std::string expect_name() {
    if (!is(TokenKind::kName)) fail(concat("expected a name, got '", seen(), "'"));
    return next().text;
  }
  void expect_keyword(std::string_view text) {
    if (!skip_name(text)) fail(concat("expected token '", text, "', got '", seen(), "'"));
  }
  void expect_end(TokenKind kind) {
    if (!is(kind)) fail(concat("expected the end of the tag, got '", seen(), "'"));
    next();
  }

  ExpressionPtr make(ExpressionKind kind, int line, std::vector<ExpressionPtr> parts = {},
                     std::string name = "") {
    auto made = std::make_unique<Expression>();
    made->kind = kind;
    made->line = line;
    made->name = std::move(name);
    made->parts = std::move(parts);
    measure(*made);
    return made;
  }
  void measure(Expression& made) const {
    const auto count = [&](const ExpressionPtr& part) {
      if (part != nullptr) made.height = std::max(made.height, part->height + 1);
    };
    for (const auto& part : made.parts) count(part);
    for (const auto& part : made.arguments.positional) count(part);
    for (const auto& [name, part] : made.arguments.named) count(part);
    count(made.arguments.more_positional);
    count(made.arguments.more_named);
    if (made.height > kHighest) fail("an expression is nested too deeply");
  }
  template <typename... Parts>
  static std::vector<ExpressionPtr> list(Parts... parts) {
    std::vector<ExpressionPtr> out;
    (out.push_back(std::move(parts)), ...);
    return out;
  }
  ExpressionPtr constant(Value value, int line) {
    ExpressionPtr made = make(ExpressionKind::kConstant, line);
    made->value = std::move(value);
    return made;
  }

  // Statements up to a tag with one of these names, which is left for the caller; to the end
  // without names.
  Body body(Names ends) {
    const Level level(this);
    Body out;
    while (!is(TokenKind::kEnd)) {
      const Token begin = next();
      Statement made{.kind = StatementKind::kText, .line = begin.line};
      if (begin.kind == TokenKind::kData) {
        made.text = begin.text;
      } else if (begin.kind == TokenKind::kVariableBegin) {
        made.kind = StatementKind::kPrint;
        made.expressions.push_back(tuple());
        expect_end(TokenKind::kVariableEnd);
      } else {
        if (is_one_of(ends)) return out;
        made = statement();
        expect_end(TokenKind::kBlockEnd);
      }
      out.push_back(std::move(made));
    }
    if (ends.size() > 0) {
      fail(concat("Unexpected end of template: the tag '", *(ends.end() - 1), "' is missing"));
    }
    return out;
  }

  // The rest of a tag, and what is between it and one of these.
  Body block(Names ends) {
    skip_operator(":");
    expect_end(TokenKind::kBlockEnd);
    return body(ends);
  }

  Statement statement() {
    if (!is(TokenKind::kName)) fail("tag name expected");
    const int line = token().line;
    const std::string tag = next().text;
    Statement made{.kind = StatementKind::kText, .line = line};
    if (tag == "for") {
      parse_for(made);
    } else if (tag == "if") {
      parse_if(made);
    } else if (tag == "set") {
      parse_set(made);
    } else if (tag == "with") {
      parse_with(made);
    } else if (tag == "macro") {
      made.kind = StatementKind::kMacro;
      made.text = target_name();
      parameters(made);
      macro_body(made, "endmacro");
    } else if (tag == "call") {
      made.kind = StatementKind::kCall;
      if (is_operator("(")) parameters(made);
      made.expressions.push_back(expression());
      if (made.expressions[0]->kind != ExpressionKind::kCall) fail("expected call");
      macro_body(made, "endcall");
    } else if (tag == "filter") {
      made.kind = StatementKind::kFilter;
      made.expressions.push_back(filters(nullptr, true));
      made.body = block({"endfilter"});
      next();
    } else if (tag == "generation") {  // transformers' own: it marks what the assistant says
      made.kind = StatementKind::kScope;
      macro_body(made, "endgeneration");
    } else if (tag == "print") {
      made.kind = StatementKind::kPrint;
      while (!is(TokenKind::kBlockEnd)) {
        if (!made.expressions.empty()) expect_operator(",");
        made.expressions.push_back(expression());
      }
    } else if (tag == "break" || tag == "continue") {
      if (loops_ == 0) fail_at(line, concat("'", tag, "' outside loop"));
      made.kind = tag == "break" ? StatementKind::kBreak : StatementKind::kContinue;
    } else {
      const bool known = is_jinja_tag(tag);
      fail_at(line, concat(known ? "the tag '" : "Encountered unknown tag '", tag,
                           known ? "' is not supported in chat templates" : "'"));
    }
    return made;
  }

  void parse_for(Statement& made) {
    made.kind = StatementKind::kFor;
    ++for_tags_;
    made.target = target("in");
    expect_keyword("in");
    made.expressions.push_back(tuple(false, "recursive"));
    if (skip_name("if")) made.test = expression();
    made.recursive = skip_name("recursive");
    ++loops_;
    made.body = block({"endfor", "else"});
    --loops_;
    if (next().text == "else") {
      made.other = block({"endfor"});
      next();
    }
    --for_tags_;
  }

  void parse_if(Statement& made) {
    made.kind = StatementKind::kIf;
    made.expressions.push_back(tuple(false));
    made.body = block({"elif", "else", "endif"});
    const Token end = next();
    if (end.text == "elif") {
      const Level level(this);
      Statement inner{.kind = StatementKind::kIf, .line = end.line};
      parse_if(inner);
      made.other.push_back(std::move(inner));
    } else if (end.text == "else") {
      made.other = block({"endif"});
      next();
    }
  }

  void parse_set(Statement& made) {
    made.target = target("", true);
    if (skip_operator("=")) {
      made.kind = StatementKind::kSet;
      made.expressions.push_back(tuple());
      return;
    }
    made.kind = StatementKind::kSetBlock;
    made.expressions.push_back(filters(nullptr, false));
    made.body = block({"endset"});
    next();
  }

  void parse_with(Statement& made) {
    made.kind = StatementKind::kWith;
    while (!is(TokenKind::kBlockEnd)) {
      if (!made.targets.empty()) expect_operator(",");
      made.targets.push_back(target(""));
      expect_operator("=");
      made.expressions.push_back(expression());
    }
    made.body = block({"endwith"});
    next();
  }

  void parameters(Statement& made) {
    expect_operator("(");
    while (!is_operator(")")) {
      if (!made.parameters.empty()) expect_operator(",");
      Parameter one{.name = target_name(), .value = nullptr};
      if (skip_operator("=")) {
        one.value = expression();
      } else if (!made.parameters.empty() && made.parameters.back().value != nullptr) {
        fail("non-default argument follows default argument");
      }
      if (one.name == "caller" && one.value == nullptr) {
        fail("the special \"caller\" argument must be omitted or be given a default");
      }
      made.parameters.push_back(std::move(one));
    }
    next();
  }

  // A macro's body is a function: loops around it do not reach into it.
  void macro_body(Statement& made, std::string_view end) {
    const int loops = std::exchange(loops_, 0);
    made.body = block({end});
    next();
    loops_ = loops;
  }

  std::string target_name() {
    const std::string name = expect_name();
    check_target(name);
    return name;
  }

  void check_target(const std::string& name) const {
    constexpr std::array<std::string_view, 6> kConstants = {"true",  "false", "True",
                                                            "False", "none",  "None"};
    if (std::find(kConstants.begin(), kConstants.end(), name) != kConstants.end()) {
      fail(concat("can't assign to '", name, "'"));
    }
    if (name == "loop" && for_tags_ > 0)
      fail("Can't assign to special loop variable in for-loop target");
  }

  // What is assigned to: a name, a namespace's attribute, or several in a tuple.
  ExpressionPtr target(std::string_view end, bool with_namespace = false) {
    const int line = token().line;
    std::vector<ExpressionPtr> all;
    bool several = false;
    while (true) {
      if (!all.empty()) expect_operator(",");
      const bool closed = is(TokenKind::kVariableEnd) || is(TokenKind::kBlockEnd) ||
                          is_operator(")") || (!end.empty() && is_name(end));
      if (closed) break;
      all.push_back(one_target(with_namespace));
      if (!is_operator(",")) break;
      several = true;
    }
    if (all.empty()) fail(concat("Expected an expression, got '", seen(), "'"));
    if (!several) return std::move(all[0]);
    return make(ExpressionKind::kTuple, line, std::move(all));
  }

  ExpressionPtr one_target(bool with_namespace) {
    const Level level(this);
    const int line = token().line;
    if (skip_operator("(")) {
      ExpressionPtr inner = target("");
      expect_operator(")");
      return inner;
    }
    const std::string name = expect_name();
    if (with_namespace && skip_operator(".")) {
      ExpressionPtr made = make(ExpressionKind::kAttribute, line, {}, expect_name());
      made->space = name;
      return made;
    }
    check_target(name);
    return make(ExpressionKind::kName, line, {}, name);
  }

  ExpressionPtr tuple(bool with_condition = true, std::string_view end = "",
                      bool in_parentheses = false) {
    const int line = token().line;
    std::vector<ExpressionPtr> all;
    bool several = false;
    while (true) {
      if (!all.empty()) expect_operator(",");
      if (is(TokenKind::kVariableEnd) || is(TokenKind::kBlockEnd) || is_operator(")") ||
          (!end.empty() && is_name(end))) {
        break;
      }
      all.push_back(with_condition ? expression() : either());
      if (!is_operator(",")) break;
      several = true;
    }
    if (!several && !all.empty()) return std::move(all[0]);
    if (!several && !in_parentheses) fail(concat("Expected an expression, got '", seen(), "'"));
    return make(ExpressionKind::kTuple, line, std::move(all));
  }

  ExpressionPtr expression() {
    const Level level(this);
    const int line = token().line;
    ExpressionPtr left = either();
    while (skip_name("if")) {
      ExpressionPtr test = either();
      ExpressionPtr otherwise = skip_name("else") ? expression() : nullptr;
      left = make(ExpressionKind::kCondition, line,
                  list(std::move(left), std::move(test), std::move(otherwise)));
    }
    return left;
  }

  ExpressionPtr either() {
    const int line = token().line;
    ExpressionPtr left = both();
    while (skip_name("or")) left = make(ExpressionKind::kOr, line, list(std::move(left), both()));
    return left;
  }

  ExpressionPtr both() {
    const int line = token().line;
    ExpressionPtr left = negation();
    while (skip_name("and"))
      left = make(ExpressionKind::kAnd, line, list(std::move(left), negation()));
    return left;
  }

  ExpressionPtr negation() {
    const int line = token().line;
    if (!skip_name("not")) return comparison();
    const Level level(this);
    return make(ExpressionKind::kUnary, line, list(negation()), "not");
  }

  ExpressionPtr comparison() {
    const int line = token().line;
    std::vector<ExpressionPtr> parts = list(sum());
    std::vector<std::string> names;
    constexpr std::array<std::string_view, 6> kOrders = {"==", "!=", "<", "<=", ">", ">="};
    while (true) {
      if (is(TokenKind::kOperator) &&
          std::find(kOrders.begin(), kOrders.end(), token().text) != kOrders.end()) {
        names.push_back(next().text);
      } else if (skip_name("in")) {
        names.emplace_back("in");
      } else if (is_name("not") && is_name(look(), "in")) {
        next();
        next();
        names.emplace_back("not in");
      } else {
        break;
      }
      parts.push_back(sum());
    }
    if (names.empty()) return std::move(parts[0]);
    ExpressionPtr made = make(ExpressionKind::kCompare, line, std::move(parts));
    made->names = std::move(names);
    return made;
  }

  ExpressionPtr sum() {
    const int line = token().line;
    ExpressionPtr left = join();
    while (is_operator("+") || is_operator("-")) {
      const std::string name = next().text;
      left = make(ExpressionKind::kBinary, line, list(std::move(left), join()), name);
    }
    return left;
  }

  ExpressionPtr join() {
    const int line = token().line;
    std::vector<ExpressionPtr> parts = list(product());
    while (skip_operator("~")) parts.push_back(product());
    return parts.size() == 1 ? std::move(parts[0])
                             : make(ExpressionKind::kJoin, line, std::move(parts));
  }

  ExpressionPtr product() {
    const int line = token().line;
    ExpressionPtr left = power();
    while (is_operator("*") || is_operator("/") || is_operator("//") || is_operator("%")) {
      const std::string name = next().text;
      left = make(ExpressionKind::kBinary, line, list(std::move(left), power()), name);
    }
    return left;
  }

  ExpressionPtr power() {
    const int line = token().line;
    ExpressionPtr left = unary(true);
    while (skip_operator("**"))
      left = make(ExpressionKind::kBinary, line, list(std::move(left), unary(true)), "**");
    return left;
  }

  ExpressionPtr unary(bool with_filters) {
    const Level level(this);
    const int line = token().line;
    ExpressionPtr made;
    if (is_operator("-") || is_operator("+")) {
      const std::string name = next().text;
      made = make(ExpressionKind::kUnary, line, list(unary(false)), name);
    } else {
      made = primary();
    }
    made = postfix(std::move(made));
    return with_filters ? filter_expression(std::move(made)) : std::move(made);
  }

  ExpressionPtr primary() {
    const Token one = token();
    if (one.kind == TokenKind::kName) {
      next();
      if (one.text == "true" || one.text == "True") return constant(true, one.line);
      if (one.text == "false" || one.text == "False") return constant(false, one.line);
      if (one.text == "none" || one.text == "None") return constant(None(), one.line);
      if (one.text == "self" || one.text == "super" || one.text == "lipsum") {
        fail_at(one.line, concat("'", one.text, "' is not supported in chat templates"));
      }
      return make(ExpressionKind::kName, one.line, {}, one.text);
    }
    if (one.kind == TokenKind::kString) {
      std::string text;
      while (is(TokenKind::kString)) text += next().text;
      return constant(text, one.line);
    }
    if (one.kind == TokenKind::kNumber) return constant(next().number, one.line);
    const Level level(this);
    if (skip_operator("(")) {
      ExpressionPtr made = tuple(true, "", true);
      expect_operator(")");
      return made;
    }
    if (skip_operator("[")) return make(ExpressionKind::kList, one.line, items("]", false));
    if (skip_operator("{")) return make(ExpressionKind::kDict, one.line, items("}", true));
    fail(concat("unexpected '", seen(), "'"));
  }

  // Up to a bracket, with or without a comma before it.
  std::vector<ExpressionPtr> items(std::string_view close, bool pairs) {
    std::vector<ExpressionPtr> all;
    while (!is_operator(close)) {
      if (!all.empty()) expect_operator(",");
      if (is_operator(close)) break;
      all.push_back(expression());
      if (pairs) {
        expect_operator(":");
        all.push_back(expression());
      }
    }
    next();
    return all;
  }

  ExpressionPtr postfix(ExpressionPtr node) {
    while (true) {
      if (is_operator(".") || is_operator("[")) {
        node = subscript(std::move(node));
      } else if (is_operator("(")) {
        node = call(std::move(node));
      } else {
        return node;
      }
    }
  }

  ExpressionPtr filter_expression(ExpressionPtr node) {
    while (true) {
      if (is_operator("|")) {
        node = filters(std::move(node), false);
      } else if (is_name("is")) {
        node = test(std::move(node));
      } else if (is_operator("(")) {
        node = call(std::move(node));
      } else {
        return node;
      }
    }
  }

  ExpressionPtr subscript(ExpressionPtr node) {
    const int line = token().line;
    if (next().text == ".") {
      const Token one = next();
      if (one.kind == TokenKind::kName)
        return make(ExpressionKind::kAttribute, line, list(std::move(node)), one.text);
      if (one.kind != TokenKind::kNumber || !one.number.is_integer())
        fail("expected name or number");
      return make(ExpressionKind::kItem, line, list(std::move(node), constant(one.number, line)));
    }
    std::vector<ExpressionPtr> all;
    while (!is_operator("]")) {
      if (!all.empty()) expect_operator(",");
      all.push_back(subscribed());
    }
    next();
    if (all.size() == 1 && all[0]->kind == ExpressionKind::kSlice) {
      all[0]->parts[0] = std::move(node);
      measure(*all[0]);
      return std::move(all[0]);
    }
    const bool slices = std::any_of(all.begin(), all.end(), [](const auto& one) {
      return one->kind == ExpressionKind::kSlice && one->parts[0] == nullptr;
    });
    if (slices) fail("a slice among several subscripts is not supported");
    ExpressionPtr key =
        all.size() == 1 ? std::move(all[0]) : make(ExpressionKind::kTuple, line, std::move(all));
    return make(ExpressionKind::kItem, line, list(std::move(node), std::move(key)));
  }

  ExpressionPtr subscribed() {
    const int line = token().line;
    ExpressionPtr start, stop, step;
    if (!is_operator(":")) {
      start = expression();
      if (!is_operator(":")) return start;
    }
    next();
    const auto more = [&] { return !is_operator("]") && !is_operator(","); };
    if (!is_operator(":") && more()) stop = expression();
    if (skip_operator(":") && more()) step = expression();
    return make(ExpressionKind::kSlice, line,
                list(ExpressionPtr(), std::move(start), std::move(stop), std::move(step)));
  }

  CallArguments arguments() {
    expect_operator("(");
    CallArguments out;
    const auto ensure = [&](bool right) {
      if (!right) fail("invalid syntax for function call expression");
    };
    for (bool first = true; !is_operator(")"); first = false) {
      if (!first) {
        expect_operator(",");
        if (is_operator(")")) break;
      }
      if (skip_operator("*")) {
        ensure(out.more_positional == nullptr && out.more_named == nullptr);
        out.more_positional = expression();
      } else if (skip_operator("**")) {
        ensure(out.more_named == nullptr);
        out.more_named = expression();
      } else if (is(TokenKind::kName) && is_operator(look(), "=")) {
        ensure(out.more_named == nullptr);
        const std::string name = next().text;
        next();
        ensure(std::none_of(out.named.begin(), out.named.end(),
                            [&](const auto& one) { return one.first == name; }));
        out.named.emplace_back(name, expression());
      } else {
        ensure(out.more_positional == nullptr && out.more_named == nullptr && out.named.empty());
        out.positional.push_back(expression());
      }
    }
    next();
    return out;
  }

  ExpressionPtr call(ExpressionPtr node) {
    const int line = token().line;
    if (node->kind == ExpressionKind::kAttribute && is_unsupported_method(node->name)) {
      fail(concat("the method '", node->name, "' is not supported in chat templates"));
    }
    ExpressionPtr made = make(ExpressionKind::kCall, line, list(std::move(node)));
    made->arguments = arguments();
    measure(*made);
    return made;
  }

  std::string dotted_name() {
    std::string name = expect_name();
    while (skip_operator(".")) append(name, ".", expect_name());
    return name;
  }

  ExpressionPtr filters(ExpressionPtr node, bool begun) {
    while (is_operator("|") || begun) {
      if (!begun) next();
      begun = false;
      const int line = token().line;
      const std::string name = dotted_name();
      check(name, "filter", knows_filter(name), is_jinja_filter(name));
      node = make(ExpressionKind::kFilter, line, list(std::move(node)), name);
      if (is_operator("(")) node->arguments = arguments();
      check_called(*node);
      measure(*node);
    }
    return node;
  }

  ExpressionPtr test(ExpressionPtr node) {
    const int line = next().line;
    const bool negated = skip_name("not");
    const std::string name = dotted_name();
    check(name, "test", knows_test(name), knows_test(name));
    ExpressionPtr made = make(ExpressionKind::kTest, line, list(std::move(node)), name);
    const bool operand = is(TokenKind::kName) || is(TokenKind::kString) || is(TokenKind::kNumber) ||
                         is_operator("[") || is_operator("{");
    if (is_operator("(")) {
      made->arguments = arguments();
    } else if (operand && !is_one_of({"else", "or", "and"})) {
      if (is_name("is")) fail("You cannot chain multiple tests with is");
      made->arguments.positional.push_back(postfix(primary()));
    }
    measure(*made);
    return negated ? make(ExpressionKind::kUnary, line, list(std::move(made)), "not")
                   : std::move(made);
  }

  void check(const std::string& name, std::string_view what, bool known, bool jinja) const {
    if (known) return;
    fail(jinja ? concat("the ", what, " '", name, "' is not supported in chat templates")
               : concat("No ", what, " named '", name, "'."));
  }

  // map("name") and select("name") call filters and tests by name: known ones, where the name is
  // there to be read.
  void check_called(const Expression& node) const {
    const bool by_attribute = node.name == "selectattr" || node.name == "rejectattr";
    const bool tests = by_attribute || node.name == "select" || node.name == "reject";
    const size_t at = by_attribute ? 1 : 0;
    const auto& given = node.arguments.positional;
    if ((!tests && node.name != "map") || given.size() <= at ||
        given[at]->kind != ExpressionKind::kConstant || !given[at]->value.is_string()) {
      return;
    }
    const std::string& name = given[at]->value.text();
    if (tests) {
      check(name, "test", knows_test(name), knows_test(name));
    } else {
      check(name, "filter", knows_filter(name), is_jinja_filter(name));
    }
  }

  std::vector<Token> tokens_;
  size_t at_ = 0;
  int depth_ = 0, loops_ = 0, for_tags_ = 0;
};

}  // namespace

Syntax parse(std::string_view source) { return Parser(source).run(); }

}  // namespace baton::engine::jinja
