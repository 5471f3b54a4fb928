// Which fields a request and its messages may have, and which of them only with a value that asks
// for nothing. Internal to engine/http.
#pragma once

#include <nlohmann/json.hpp>

#include "absl/status/status.h"

namespace baton::engine::http {

// InvalidArgument naming the first field that is unknown (with the nearest name) or not supported.
absl::Status check_api_fields(const nlohmann::json& body, bool chat);
// The same of /tokenize and /detokenize.
absl::Status check_tokenize_fields(const nlohmann::json& body);
absl::Status check_detokenize_fields(const nlohmann::json& body);
// The same of an object in `messages`, and of a part of type "text" in its content.
absl::Status check_message_fields(const nlohmann::json& message);
absl::Status check_part_fields(const nlohmann::json& part);

}  // namespace baton::engine::http
