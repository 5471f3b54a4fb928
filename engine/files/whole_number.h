// What JSON calls an integer: a whole number, written as 3 or as 3.0.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>

namespace baton::engine {

// Nothing for all else, and for what int64_t cannot hold.
std::optional<int64_t> whole_number(const nlohmann::json& value);

}  // namespace baton::engine
