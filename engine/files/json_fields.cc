// Checked access to JSON from files.
#include "engine/files/json_fields.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "engine/files/utf8.h"
#include "transport/base/json_depth.h"

namespace baton::engine {

absl::StatusOr<nlohmann::json> parse_json(std::string_view text, std::string_view what) {
  if (base::json_too_deep(text)) {
    return absl::InvalidArgumentError(
        absl::StrCat(view(what), " is nested more than ", base::kMaxJsonDepth, " deep"));
  }
  nlohmann::json value = nlohmann::json::parse(text.begin(), text.end(), nullptr, false);
  if (value.is_discarded()) {
    return absl::InvalidArgumentError(
        absl::StrCat(view(what), " is not valid JSON (", text.size(), " bytes)"));
  }
  return value;
}

const nlohmann::json& member(const nlohmann::json& object, const char* key) {
  static const nlohmann::json kNull;
  if (!object.is_object()) return kNull;
  const auto it = object.find(key);
  return it == object.end() ? kNull : *it;
}

std::optional<int64_t> whole_number(const nlohmann::json& value) {
  if (value.is_number_unsigned()) {
    const auto number = value.get<uint64_t>();
    if (number > uint64_t{INT64_MAX}) return std::nullopt;
    return static_cast<int64_t>(number);
  }
  if (value.is_number_integer()) return value.get<int64_t>();
  if (!value.is_number()) return std::nullopt;
  const auto number = value.get<double>();
  constexpr double kLimit = 9223372036854775808.0;  // 2^63
  if (!(number >= -kLimit && number < kLimit) || std::trunc(number) != number) return std::nullopt;
  return static_cast<int64_t>(number);
}

absl::StatusOr<int64_t> int_field(const nlohmann::json& object, const char* key, int64_t low,
                                  int64_t high, int64_t fallback) {
  const nlohmann::json& value = member(object, key);
  if (value.is_null()) return fallback;
  const std::optional<int64_t> number = whole_number(value);
  if (number.has_value() && *number >= low && *number <= high) return *number;
  const bool is_whole = value.is_number() && std::trunc(value.get<double>()) == value.get<double>();
  if (!is_whole) {
    return absl::InvalidArgumentError(absl::StrCat("\"", key, "\" must be an integer"));
  }
  return absl::InvalidArgumentError(
      absl::StrCat("\"", key, "\" is ", value.dump(), ", outside [", low, ", ", high, "]"));
}

absl::StatusOr<double> number_field(const nlohmann::json& object, const char* key, double low,
                                    double high, double fallback) {
  const nlohmann::json& value = member(object, key);
  if (value.is_null()) return fallback;
  if (!value.is_number()) {
    return absl::InvalidArgumentError(absl::StrCat("\"", key, "\" must be a number"));
  }
  const double number = value.get<double>();
  if (!(number >= low && number <= high)) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", key, "\" is ", number, ", outside [", low, ", ", high, "]"));
  }
  return number;
}

absl::StatusOr<bool> bool_field(const nlohmann::json& object, const char* key, bool fallback) {
  const nlohmann::json& value = member(object, key);
  if (value.is_null()) return fallback;
  if (!value.is_boolean()) {
    return absl::InvalidArgumentError(absl::StrCat("\"", key, "\" must be true or false"));
  }
  return value.get<bool>();
}

absl::StatusOr<std::string> string_field(const nlohmann::json& object, const char* key,
                                         std::string_view fallback) {
  const nlohmann::json& value = member(object, key);
  if (value.is_null()) return std::string(fallback);
  if (!value.is_string()) {
    return absl::InvalidArgumentError(absl::StrCat("\"", key, "\" must be a string"));
  }
  return value.get<std::string>();
}

}  // namespace baton::engine
