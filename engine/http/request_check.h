// Code that the server and the router share: every request gets an id, and its API key is checked,
// before its route sees it; and /metrics has a part about clients' connections.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "engine/http/http_listener.h"

namespace baton::engine::http {

inline constexpr char kRequestIdHeader[] = "X-Request-Id";
// From a router, which is answered in streams whatever its client is: "answer" where the client
// waits for the last token, not for the first.
inline constexpr char kWaitsForHeader[] = "X-Baton-Waits-For";

// Gives the request its id, and the answer its X-Request-Id: the client's, if it may be used, else
// a new one.
void mark_request(HttpExchange* exchange);

// Paths that show nothing of requests and models: /health, /metrics, /version, /v1/baton/address.
// They need no key, and are answered by a server that is shutting down, too.
std::vector<std::string> always_answered();

// A listener's part of /metrics.
void print_connections(const HttpListenerStats& stats, std::string* page);

// True if the request may go on; else it was answered with 401.
bool check_api_key(std::string_view key, HttpExchange* exchange);

// A request's name: 32 hexadecimal digits, at random.
std::string make_request_id();

// True if a client's own id, from the header X-Request-Id, may be used in headers and logs: 1 to
// 128 letters, digits, "-", "_", ".", ":".
bool is_request_id(std::string_view id);

}  // namespace baton::engine::http
