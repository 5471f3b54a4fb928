// How the two sides of a benchmark talk: a client that asks, a server that answers.
//
// Messages are notifications that hold a JSON object: questions {"do":VERB,...}, answers of any
// members. An answer {"error":TEXT} is a refusal; {"do":"bye"} gets none.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/report/report.h"
#include "transport/worker.h"

namespace baton::bench {

// The time that the other side may take to prepare memory: large memory takes long to fault in.
inline constexpr Time kAnswerTimeout = std::chrono::seconds(120);

// "host:port", "host", ":port", "[v6]:port", "port"; parts that are missing stay as they are.
absl::Status split_address(const std::string& text, std::string& host, uint16_t& port);
// The same as "host:port", of this machine where it names no host.
absl::StatusOr<std::string> server_address(const std::string& text, uint16_t port);

// Connects to `address` (host:port or encoded) and waits until that is so. `server` says in words
// what must run there: "`baton kv_bw --listen`". Unavailable when no server answers within 15 s.
absl::StatusOr<PeerId> connect_to_server(Worker& worker, const std::string& address,
                                         const std::string& provider, std::string_view server);

// The server is no longer there: Unavailable, with the worker's reason.
absl::Status server_has_gone(Worker& worker, PeerId peer);

// Puts the next message of the server into its argument and returns true, if there is one.
using Hear = std::function<bool(std::string&)>;

// Sends `question` (null: asks nothing more) and waits for the next message. Errors:
// DeadlineExceeded when none comes, Unavailable when the server goes, InvalidArgument when it is no
// object, FailedPrecondition with the server's words when it refuses.
absl::StatusOr<Json> ask(Worker& worker, PeerId peer, const Json& question, const Hear& hear,
                         Time timeout = kAnswerTimeout);

// Tells the server that no more questions come. Waits for at most a second until that has left.
void say_bye(Worker& worker, PeerId peer);

// The object in a message; null for anything else.
Json parse_message(std::string_view payload);
// A member that is a string, "" where there is none.
std::string text_of(const Json& object, const char* key);
// The answer that refuses.
Json refusal(const absl::Status& status);

}  // namespace baton::bench
