// Checked access to JSON from files: every type and range is tested, nothing throws.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace baton::engine {

// Parses `text`, which must hold one value nested at most 64 deep; `what` names it in errors.
absl::StatusOr<nlohmann::json> parse_json(std::string_view text, std::string_view what);

// Field accessors: the field if it is there (JSON null counts as missing), else the fallback;
// InvalidArgument naming the field when it has another type or lies outside [low, high].
absl::StatusOr<int64_t> int_field(const nlohmann::json& object, const char* key, int64_t low,
                                  int64_t high, int64_t fallback);
absl::StatusOr<double> number_field(const nlohmann::json& object, const char* key, double low,
                                    double high, double fallback);
absl::StatusOr<bool> bool_field(const nlohmann::json& object, const char* key, bool fallback);
absl::StatusOr<std::string> string_field(const nlohmann::json& object, const char* key,
                                         std::string_view fallback);
// The member, or a null value if `object` is not an object or has no such member.
const nlohmann::json& member(const nlohmann::json& object, const char* key);

// What JSON calls an integer: a whole number, written as 3 or as 3.0.

// Nothing for all else, and for what int64_t cannot hold.
std::optional<int64_t> whole_number(const nlohmann::json& value);

}  // namespace baton::engine
