// Which fields a request may have, and which of them only with a value that asks for nothing.
// Internal to engine/http.
#pragma once

#include <nlohmann/json.hpp>

#include "absl/status/status.h"

namespace baton::engine::http {

// InvalidArgument naming the first field that is unknown (with the nearest name) or not supported.
absl::Status check_api_fields(const nlohmann::json& body, bool chat);

}  // namespace baton::engine::http
