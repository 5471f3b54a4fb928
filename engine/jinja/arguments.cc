// Binding arguments to names.
#include "engine/jinja/arguments.h"

namespace baton::engine::jinja {

Arguments::Arguments(std::string_view function, const Args& given,
                     std::initializer_list<std::string_view> names, size_t required)
    : function_(function), values_(names.size()) {
  if (given.positional.size() > names.size()) {
    throw Error(concat(function, " takes at most ", names.size(), " arguments"));
  }
  for (size_t i = 0; i < given.positional.size(); ++i) values_[i] = given.positional[i];
  for (const auto& [name, value] : given.named) {
    size_t i = 0;
    for (const std::string_view one : names) {
      if (one == name) break;
      ++i;
    }
    if (i == names.size()) throw Error(concat(function, " takes no argument '", name, "'"));
    if (has(i)) throw Error(concat(function, " was given '", name, "' twice"));
    values_[i] = value;
  }
  for (size_t i = 0; i < required; ++i) {
    if (!has(i)) throw Error(concat(function, " lacks its argument ", i + 1));
  }
}

int64_t Arguments::integer(size_t i, int64_t fallback) const {
  if (!has(i)) return fallback;
  at(i).used();
  if (!at(i).is_integer())
    throw Error(concat(function_, " was given a ", at(i).type(), " for an integer"));
  return at(i).integer();
}

std::string Arguments::text(size_t i, std::string_view fallback) const {
  if (!has(i)) return std::string(fallback);
  at(i).used();
  if (!at(i).is_string())
    throw Error(concat(function_, " was given a ", at(i).type(), " for a string"));
  return at(i).text();
}

}  // namespace baton::engine::jinja
