// Names: the one that a user mistyped, and those of an enum in a table.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace baton::base {

// The one of `known` that takes the fewest edits (a letter more, less, other, or two swapped) from
// `name`, the first of them where several do. Nothing where all take more than a third of the
// name's letters, and more than two.
std::optional<std::string> nearest_name(std::string_view name,
                                        const std::vector<std::string>& known);

// "; did you mean X?" for the nearest, "" where nothing is near.
std::string did_you_mean(std::string_view name, const std::vector<std::string>& known);

// The name of an enum's value in a table, by its number; `otherwise` for a number behind the last.
template <typename Enum, size_t kCount>
const char* name_at(const char* const (&names)[kCount], Enum value, const char* otherwise) {
  const auto at = static_cast<size_t>(value);
  return at < kCount ? names[at] : otherwise;
}

}  // namespace baton::base
