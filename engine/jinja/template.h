// Jinja templates, rendered as transformers' apply_chat_template renders them: Jinja2's sandbox
// with trim_blocks and lstrip_blocks, break and continue, raise_exception(), strftime_now(), JSON
// as json.dumps() writes it.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace baton::engine::jinja {

struct Syntax;

// Immutable; any number of threads may render at once. Copies share what was parsed.
//
// What is rendered is what Jinja2 renders. What is not supported is an error that names it: tags,
// filters, tests and methods when the template is parsed (inheritance and imports, random, urlize
// and the like); a value whose text would be an address in Python, integers beyond 64 bits, and a
// rendering that takes too long, when that happens.
class Template {
 public:
  // InvalidArgument with the line of what is no template or not supported.
  static absl::StatusOr<Template> parse(std::string_view source);

  // `values` is an object: the template's variables. InvalidArgument with the template's words
  // where it calls raise_exception(), or with what cannot be rendered.
  absl::StatusOr<std::string> render(const nlohmann::ordered_json& values) const;

 private:
  explicit Template(std::shared_ptr<const Syntax> syntax) : syntax_(std::move(syntax)) {}
  std::shared_ptr<const Syntax> syntax_;
};

}  // namespace baton::engine::jinja
