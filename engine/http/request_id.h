// Names of requests: no two are equal, whichever worker and process made them.
#pragma once

#include <string>
#include <string_view>

namespace baton::engine::http {

// 32 hexadecimal digits, at random.
std::string make_request_id();

// Whether a client's own id, of the header X-Request-Id, can be used in headers and logs: 1 to 128
// letters, digits, "-", "_", ".", ":".
bool is_request_id(std::string_view id);

}  // namespace baton::engine::http
