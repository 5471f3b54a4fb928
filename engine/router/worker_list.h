// A worker as it is listed, on the command line or in the file that says which workers there are
// (`baton serve --role router --workers FILE`).
//
//   # one worker a line: its role, where it listens, and where it is (below; by default, the
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

// A URL, and behind it a place. InvalidArgument says which word is wrong, and how it looks.
absl::StatusOr<ListedWorker> parse_worker(std::string_view text);

// InvalidArgument names the line and what is wrong with it: a role that is neither, a URL that is
// none, a place that is none, a worker that is listed twice; also without any decode worker, and
// where the last line has no end, for then the writer may be writing still.
absl::StatusOr<ListedWorkers> parse_worker_list(std::string_view text);

// How far two workers are from each other, and what that costs.
//
// A place is a path from far to near, such as "east/rack7/host3"; a worker whose place no list has
// said is at its URL's host. What is in one place moves KV through memory; otherwise it goes
// through a network, and the further up two paths part, the more of it.

// 0 in the same place, 1 next door (only the last part differs), 2 a part further up, and so on; of
// paths that are not equally long as many as the longer one has behind where they part.
int distance(std::string_view a, std::string_view b);

// What moving a token's KV so far costs, in tokens that are computed: nothing in one place,
// `next_door`, and twice as much for each part further up, at most six times doubled.
double move_cost(int distance, double next_door);

// Whether `text` may be a place: up to 128 letters, digits, and . _ - in parts that are not empty.
bool is_place(std::string_view text);

}  // namespace baton::engine::router
