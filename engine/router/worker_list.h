// The file that says which workers there are (`baton serve --role router --workers FILE`).
//
//   # one worker a line: its role, and where it listens
//   prefill http://10.0.0.1:8001
//   decode  http://10.0.0.2:8002
#pragma once

#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/http/http_fetch.h"

namespace baton::engine::router {

struct ListedWorkers {
  std::vector<http::HttpUrl> prefill, decode;
};

// InvalidArgument names the line and what is wrong with it: a role that is neither, a malformed
// URL, words behind it, a worker that is listed twice; also without any decode worker, and where
// the last line has no end, for then the writer may be writing still.
absl::StatusOr<ListedWorkers> parse_worker_list(std::string_view text);

}  // namespace baton::engine::router
