// The tokens of a template, with what whitespace control takes away: as Jinja2 cuts it with
// trim_blocks and lstrip_blocks.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "engine/jinja/value.h"

namespace baton::engine::jinja {

enum class TokenKind {
  kData,           // text between tags
  kBlockBegin,     // {%
  kBlockEnd,       // %}
  kVariableBegin,  // {{
  kVariableEnd,    // }}
  kName,
  kString,
  kNumber,
  kOperator,
  kEnd,
};

struct Token {
  TokenKind kind = TokenKind::kEnd;
  std::string text;  // a name, an operator, data, or a string without its quotes and escapes
  Value number;
  int line = 1;
};

// Throws Error with the line of what is no template.
std::vector<Token> tokenize(std::string_view source);

}  // namespace baton::engine::jinja
