// What is done to every request of the API before its route sees it: it gets an id, and its API key
// is checked. For the server and the router.
#pragma once

#include <string>
#include <string_view>

#include "engine/http/http_listener.h"

namespace baton::engine::http {

inline constexpr char kRequestIdHeader[] = "X-Request-Id";
// From a router, which is answered in streams whatever its client is: "answer" where the client
// waits for the last token, not for the first.
inline constexpr char kWaitsForHeader[] = "X-Baton-Waits-For";

// Gives the request its id, and the answer its X-Request-Id: the client's, if it may be used, else
// a new one.
void mark_request(HttpExchange* exchange);

// True if the request may go on; else it was answered with 401. Paths that show nothing of requests
// and models (/health, /metrics, /version, /v1/baton/address) need no key.
bool check_api_key(std::string_view key, HttpExchange* exchange);

}  // namespace baton::engine::http
