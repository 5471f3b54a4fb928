// What templates may call by name.
#pragma once

#include <string_view>

namespace baton::engine::jinja {

bool knows_filter(std::string_view name);
bool is_jinja_filter(std::string_view name);  // of Jinja2's own, known or not
bool knows_test(std::string_view name);       // all of Jinja2's own
bool is_jinja_tag(std::string_view name);
// A method of Python's strings, lists, dictionaries or numbers that is not here.
bool is_unsupported_method(std::string_view name);

}  // namespace baton::engine::jinja
