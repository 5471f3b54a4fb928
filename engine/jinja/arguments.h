// The arguments of a call by the names of what is called.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/jinja/value.h"

namespace baton::engine::jinja {

class Arguments {
 public:
  // `names` in order; one that begins with '/' takes no keyword. Throws for what is missing (of the
  // first `required`), too many, unknown or given twice.
  Arguments(std::string_view function, const Args& given,
            std::initializer_list<std::string_view> names, size_t required = 0);
  bool has(size_t i) const { return values_[i].has_value(); }
  bool has_some(size_t i) const { return has(i) && !values_[i]->is_none(); }  // given, and not None
  const Value& at(size_t i) const { return *values_[i]; }
  // Throw where another type was given.
  int64_t integer(size_t i, int64_t fallback = 0) const;
  bool truth(size_t i, bool fallback = false) const { return has(i) ? at(i).truth() : fallback; }
  std::string text(size_t i, std::string_view fallback = "") const;

 private:
  std::string function_;
  std::vector<std::optional<Value>> values_;
};

}  // namespace baton::engine::jinja
