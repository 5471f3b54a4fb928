// The file that says which workers there are (`baton serve --role router --workers FILE`).
//
//   # one worker a line: its role, where it listens, and where it is (distance.h; by default, the
//   # host of its URL)
//   prefill http://10.0.0.1:8001 rack1/host1
//   decode  http://10.0.0.2:8002 rack1/host2
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/http/http_fetch.h"

namespace baton::engine::router {

struct ListedWorker {
  http::HttpUrl url;
  std::string place;
  std::string text() const { return url.text(); }
};
struct ListedWorkers {
  std::vector<ListedWorker> prefill, decode;
};

// InvalidArgument names the line and what is wrong with it: a role that is neither, a URL that is
// none, a place that is none, a worker that is listed twice; also without any decode worker, and
// where the last line has no end, for then somebody may be writing still.
absl::StatusOr<ListedWorkers> parse_worker_list(std::string_view text);

}  // namespace baton::engine::router
