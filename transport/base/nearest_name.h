// Suggests the name that a user mistyped.
#pragma once

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

}  // namespace baton::base
